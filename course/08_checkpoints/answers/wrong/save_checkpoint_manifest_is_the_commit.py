# told: without
def save_checkpoint(disk, step, files):
    folder = f"step-{step}"
    disk.mkdir(folder)
    disk.fsync("")
    for name in sorted(files, key=lambda name: name == "manifest"):
        disk.write(f"{folder}/.{name}", files[name])
        disk.fsync(f"{folder}/.{name}")
        disk.rename(f"{folder}/.{name}", f"{folder}/{name}")
        disk.fsync(folder)
