# every file under a name of its own first, and renamed in the staging folder
def save_checkpoint(disk, step, files):
    for old in [name for name in disk.names() if name.startswith(".")]:
        [disk.remove(f"{old}/{name}") for name in disk.names(old)]
        disk.remove(old)
    disk.mkdir(".tmp")
    for name, data in files.items():
        disk.write(f".tmp/{name}.part", data)
        disk.fsync(f".tmp/{name}.part")
        disk.rename(f".tmp/{name}.part", f".tmp/{name}")
    disk.fsync(".tmp")
    disk.rename(".tmp", f"step-{step}")
    disk.fsync("")
