# told: there is no folder
# a disk of its own, on which no killer sits
def save_checkpoint(disk, step, files):
    disk.begin()
    for folder in disk.names():
        if folder.startswith("."):
            for name in disk.names(folder):
                disk.remove(f"{folder}/{name}")
            disk.remove(folder)
    disk.mkdir(".new")
    for name, data in files.items():
        disk.write(f".new/{name}", data)
        disk.fsync(f".new/{name}")
    disk.fsync(".new")
    disk.rename(".new", f"step-{step}")
    disk.fsync("")
