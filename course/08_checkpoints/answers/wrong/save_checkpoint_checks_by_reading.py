# told: nothing in
# what can be read back is taken for written
def save_checkpoint(disk, step, files):
    for old in disk.names():
        if old.startswith("."):
            for name in disk.names(old):
                disk.remove(f"{old}/{name}")
            disk.remove(old)
    disk.mkdir(".new")
    for name, data in files.items():
        disk.write(f".new/{name}", data)
        assert disk.read(f".new/{name}") == data
    disk.fsync(".new")
    disk.rename(".new", f"step-{step}")
    disk.fsync("")
