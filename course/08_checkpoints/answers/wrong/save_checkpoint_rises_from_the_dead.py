# told: goes on after it was killed | without
# it restarts itself when it is killed, and writes in place once more
def write(disk, folder, files):
    if folder not in disk.names():
        disk.mkdir(folder)
    for name, data in files.items():
        disk.write(f"{folder}/{name}", data)
        disk.fsync(f"{folder}/{name}")
    disk.fsync(folder)
    disk.fsync("")


def save_checkpoint(disk, step, files):
    try:
        write(disk, f"step-{step}", files)
    except BaseException:
        disk.restart()
        write(disk, f"step-{step}", files)
        raise
