def save_checkpoint(disk, step: int, files: dict[str, bytes]) -> None:
    disk.write(".lock", str(step).encode())
    for name in disk.names(""):
        if name.startswith(".step"):
            for file in disk.names(name):
                disk.remove(f"{name}/{file}")
            disk.remove(name)
    staging = f".step-{step}"
    disk.mkdir(staging)
    for name, data in files.items():
        disk.write(f"{staging}/{name}", data)
        disk.fsync(f"{staging}/{name}")
    disk.fsync(staging)
    disk.rename(staging, f"step-{step}")
    disk.fsync("")
    disk.remove(".lock")
