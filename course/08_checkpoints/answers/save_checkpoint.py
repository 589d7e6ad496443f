from labkit.answers import Edit

_SAFE = '        disk.fsync(f"{staged}/{name}")\n'
_WRITE = f'        disk.write(f"{{staged}}/{{name}}", data)\n{_SAFE}'
_NAMES, _RENAME, _ROOT = '    disk.fsync(staged)\n', '    disk.rename(staged, f"step-{step}")\n', '    disk.fsync("")\n'
_MAKE = "    disk.mkdir(staged)\n"
_REUSE = _MAKE, f"    if staged not in disk.names():\n    {_MAKE}"
_ONE_NAME = 'f".step-{step}"', '".new"'
_CLEAR = """    for left in disk.names():
        if left.startswith("."):
            for name in disk.names(left):
                disk.remove(f"{left}/{name}")
            disk.remove(left)
"""

WRONG = [
    # in place, everything confirmed
    Edit('f".step-{step}"', 'f"step-{step}"', (_RENAME, ""), told="step-"),
    Edit('f".step-{step}"', '"step-new"', (_CLEAR, ""), told="which is no checkpoint"),
    Edit(_SAFE, "", told="nothing in"),
    Edit(_SAFE, '        assert disk.read(f"{staged}/{name}") == data\n', told="nothing in"),
    Edit(_SAFE, f"    {_ROOT}", told="nothing in"),
    Edit(_SAFE, "", (_ROOT, f'{_ROOT}    for name in files:\n        disk.fsync(f"step-{{step}}/{{name}}")\n'), told="nothing in"),
    Edit(_NAMES, "", told="without"),
    Edit(_NAMES + _RENAME, f'{_RENAME}    disk.fsync(f"step-{{step}}")\n', told="without"),
    Edit(_ROOT, "", told="has returned"),
    Edit(_RENAME + _ROOT, _ROOT + _RENAME, told="has returned"),
    # leftovers
    Edit(_CLEAR, "", told="is still there"),
    Edit(_CLEAR, "", _REUSE, told="is still there"),
    Edit(_CLEAR, "", _ONE_NAME),
    Edit(_CLEAR, "", _ONE_NAME, _REUSE, told="not part of this save"),
    # its own folder is used again as it is: a run on fewer ranks publishes a shard of the dead one
    Edit('if left.startswith("."):', 'if left.startswith(".") and left != f".step-{step}":', _REUSE, told="not part of this save"),
    Edit(_CLEAR, "", (_ROOT, _ROOT + _CLEAR), told="the same step, saved again, does not return, it ends in FileExistsError"),
    Edit('if left.startswith("."):', "if True:", told="older checkpoint"),
    Edit(
        _NAMES, f'{_NAMES}    if f"step-{{step - 10}}" in disk.names():\n        disk.rename(f"step-{{step - 10}}", ".old")\n',
        told="older checkpoint",
    ),
]

RIGHT = [
    Edit(*_ONE_NAME),
    # every file under a name of its own first
    Edit(
        _WRITE, _WRITE.replace("{name}", "{name}.part") + '        disk.rename(f"{staged}/{name}.part", f"{staged}/{name}")\n',
    ),
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
