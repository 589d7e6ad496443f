# an error cleans up behind itself; names are confirmed after each file; leftovers are cleared at both ends
def clear(disk):
    for folder in disk.names():
        if folder[0] == ".":
            for name in disk.names(folder):
                disk.remove(folder + "/" + name)
            disk.remove(folder)
    disk.fsync("")


def save_checkpoint(disk, step, files):
    clear(disk)
    hidden = f".writing-{step}"
    try:
        disk.mkdir(hidden)
        for name in sorted(files):
            disk.write(f"{hidden}/{name}", files[name])
            disk.fsync(f"{hidden}/{name}")
            disk.fsync(hidden)
        disk.rename(hidden, f"step-{step}")
        disk.fsync("")
    except OSError:
        clear(disk)
        raise
