# told: which is no checkpoint
# the staging folder is one that a reader sees
def save_checkpoint(disk, step, files):
    disk.mkdir("step-new")
    for name, data in files.items():
        disk.write(f"step-new/{name}", data)
        disk.fsync(f"step-new/{name}")
    disk.fsync("step-new")
    disk.rename("step-new", f"step-{step}")
    disk.fsync("")
