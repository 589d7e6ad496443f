from labkit.answers import Edit

_STAGE = 'staged = f".step-{step}"\n    disk.mkdir(staged)\n'
_WRITE = '        disk.write(f"{staged}/{name}", data)\n        disk.fsync(f"{staged}/{name}")\n'
_END = '    disk.fsync(staged)\n    disk.rename(staged, f"step-{step}")\n    disk.fsync("")'
_CLEAR = """    for left in disk.names():
        if left.startswith("."):
            for name in disk.names(left):
                disk.remove(f"{left}/{name}")
            disk.remove(left)
"""

WRONG = [
    # in place, the manifest last, everything confirmed
    Edit(
        _STAGE,
        'staged = f"step-{step}"\n    disk.mkdir(staged)\n',
        ('disk.rename(staged, f"step-{step}")', "pass"),
        told="step-",
    ),
    Edit('        disk.fsync(f"{staged}/{name}")\n', "", told="nothing in"),
    Edit("    disk.fsync(staged)\n", "", told="without"),
    Edit('\n    disk.fsync("")', "", told="has returned"),
    # in another order
    Edit(
        _END,
        '    disk.rename(staged, f"step-{step}")\n    disk.fsync(f"step-{step}")\n    disk.fsync("")',
        told="without",
    ),
    Edit(
        _END,
        '    disk.fsync(staged)\n    disk.fsync("")\n    disk.rename(staged, f"step-{step}")',
        told="has returned",
    ),
    Edit(
        _WRITE,
        '        disk.write(f"{staged}/{name}", data)\n',
        (_END, _END + '\n    for name in files:\n        disk.fsync(f"step-{step}/{name}")'),
        told="nothing in",
    ),
    Edit(
        _WRITE,
        '        if name != "manifest":\n            disk.write(f"{staged}/{name}", data)\n            '
        'disk.fsync(f"{staged}/{name}")\n',
        (
            _END,
            _END + '\n    if "manifest" in files:\n        disk.write(f"step-{step}/manifest", files["manifest"])'
            '\n        disk.fsync(f"step-{step}/manifest")\n        disk.fsync(f"step-{step}")',
        ),
    ),
    # leftovers
    Edit(_CLEAR, "", told="is still there"),
    Edit(
        _CLEAR,
        "",
        ("    disk.mkdir(staged)\n", "    if staged not in disk.names():\n        disk.mkdir(staged)\n"),
        told="is still there",
    ),
    Edit(_CLEAR, "", ('f".step-{step}"', '".new"')),
    Edit(
        _CLEAR,
        "",
        ('f".step-{step}"', '".new"'),
        ("    disk.mkdir(staged)\n", "    if staged not in disk.names():\n        disk.mkdir(staged)\n"),
        told="not part of this save",
    ),
    Edit('if left.startswith("."):', "if True:", told="older checkpoint"),
    Edit("        disk.fsync(f", '        disk.fsync("")\n        (lambda path: None)(f', told="nothing in"),
    # a leftover of the same step is in the way of the next try
    Edit(
        _CLEAR,
        "",
        (_END, _END + "\n" + _CLEAR.rstrip()),
        told="the same step, saved again, ends in FileExistsError",
    ),
    Edit(
        "    disk.fsync(staged)\n",
        '    disk.fsync(staged)\n    if f"step-{step - 10}" in disk.names():\n        '
        'disk.rename(f"step-{step - 10}", ".old")\n',
        told="older checkpoint",
    ),
]

RIGHT = [
    Edit('f".step-{step}"', '".new"'),
]


# %% right: an error cleans up behind itself; names are confirmed after each file; leftovers are cleared at both ends
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


# %% right: every file under a name of its own first, and renamed in the staging folder
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


# %% right: one folder for all steps, cleared at the beginning
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


# %% right: a file that names the latest, too
def save_checkpoint(disk, step: int, files: dict[str, bytes]) -> None:
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
    disk.write(".latest", str(step).encode())
    disk.fsync(".latest")
    disk.rename(".latest", "latest")
    disk.fsync("")


# %% wrong: checks by reading
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


# %% wrong: visible staging
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
