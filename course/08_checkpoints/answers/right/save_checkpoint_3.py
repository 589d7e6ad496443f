def save_checkpoint(disk, step: int, files: dict[str, bytes]) -> None:
    if ".staging" not in disk.names(""):
        disk.mkdir(".staging")
    for name in disk.names(".staging"):
        if name not in files:
            disk.remove(".staging/" + name)
    for name, data in files.items():
        disk.write(".staging/" + name, data)
        disk.fsync(".staging/" + name)
    disk.fsync(".staging")
    disk.rename(".staging", f"step-{step}")
    disk.fsync("")
