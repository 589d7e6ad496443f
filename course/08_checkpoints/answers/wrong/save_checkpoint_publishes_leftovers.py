# told: after the next save there is
# what a dead save left is published
def save_checkpoint(disk, step: int, files: dict[str, bytes]) -> None:
    # a hidden folder that a dead save left is published: its numbers are newer than none
    for name in disk.names(""):
        if name.startswith("."):
            disk.rename(name, name[1:])
    staging = f".step-{step}"
    disk.mkdir(staging)
    for name, data in files.items():
        disk.write(f"{staging}/{name}", data)
        disk.fsync(f"{staging}/{name}")
    disk.fsync(staging)
    disk.rename(staging, f"step-{step}")
    disk.fsync("")
