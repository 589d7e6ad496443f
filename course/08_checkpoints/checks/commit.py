"""Lab 08, an atomic save: the program is killed at every change, and its power is cut after every change.

The disk notes every change, and kills the program at one (`course.lab08.disk`). The program runs once to its end. Then
it is killed at its first change, its second, ..., on a fresh disk each time.
After each death a new program saves on the same disk: the next step; and, on a disk with the same death, the same step
once more, as a run does that resumes from the older checkpoint. From the notes the judge computes what a power cut can
leave after each change.

| asked                                          | how it is seen                                                   |
|------------------------------------------------|------------------------------------------------------------------|
| the checkpoint is there, and the older one too | the disk at the end                                              |
| killed anywhere: nothing half is visible       | folders `step-*` after each death: exactly the files of one save |
| and the next save is not in the way of it      | the program after each death ends, and leaves no hidden folder   |
| no power: nothing half is visible              | all that can be left after each change                           |
| what has returned stays                        | all that can be left at the end                                  |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from course.lab08.disk import Disk, Left, replay
from labkit.exercises import Answer, Case, Draw, Exercise

_MOST = 100  # changes of a save


def _drive(exercise: Any, before: Any, step: int, files: Any, later: Any) -> Any:
    from course.lab08.disk import Disk, Killed
    from labkit.tools import note

    said = []

    def begin(kill_at: int = 0) -> Any:
        disk = Disk({path: text.encode() for path, text in before.items()}, kill_at)
        note("disk", {"kill_at": kill_at, "log": disk.log})
        return disk

    def save(disk: Any, number: int, texts: Any) -> None:
        exercise.save_checkpoint(disk, number, {name: text.encode() for name, text in texts.items()})

    save(begin(), step, files)
    for then in ((step + 10, later), (step, files)):
        for change in range(1, 101):
            disk, killed = begin(change), False
            try:
                save(disk, step, files)
            except Killed:
                killed = True
            disk.restart()
            disk.log.append(("restart",))
            if not killed:
                break
            try:
                if f"step-{then[0]}" not in disk.names():  # it died when all was done: a run goes on from there
                    save(disk, *then)
                said.append("")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


# ------------------------------------------------------------------------------------------------- what is whole


def _saves(inputs: Mapping[str, Any]) -> dict[str, dict[str, bytes]]:
    """Every checkpoint that there may be, as {folder: its files}."""
    found: dict[str, dict[str, bytes]] = {}
    for path, text in inputs["before"].items():
        folder, _, name = path.rpartition("/")
        found.setdefault(folder, {})[name] = text.encode()
    for step, files in ((inputs["step"], inputs["files"]), (inputs["step"] + 10, inputs["later"])):
        found[f"step-{step}"] = {name: text.encode() for name, text in files.items()}
    return found


def _half(folder: str, left: Left, saves: Mapping[str, Mapping[str, bytes]]) -> str | None:
    """Say what is wrong with a folder that a reader sees."""
    want = saves.get(folder)
    if want is None:
        return f"a folder {folder}, which is no checkpoint that was saved"
    if missing := sorted(want.keys() - left.files.keys()):
        return f"{folder} without {missing[0]}"
    if more := sorted(left.files.keys() - want.keys()):
        return f"{folder} with {more[0]}, which is not part of this save"
    for name, data in want.items():
        if other := left.files[name] - {data}:
            shortest = min(other, key=len)
            what = "nothing" if not shortest else "half of its bytes" if data.startswith(shortest) else "other bytes"
            return f"{folder} with {what} in {name}"
    return None


def _visible(folders: Mapping[str, Any]) -> Iterator[str]:
    return (name for name in folders if not name.startswith("."))


def _seen(folders: Mapping[str, Left], saves: Mapping[str, Mapping[str, bytes]], old: str) -> str | None:
    if old not in folders:
        return f"no {old}: the older checkpoint has to stay"
    return next((half for name in _visible(folders) if (half := _half(name, folders[name], saves))), None)


def _cut(disk: Disk, saves: Mapping[str, Mapping[str, bytes]], old: str, new: str = "") -> str | None:
    """Say the worst that a power cut can leave now; with `new` this checkpoint must be there."""
    for folders in disk.after_a_power_cut():
        if old not in folders:
            return f"no {old}: the older checkpoint has to stay"
        for name in _visible(folders):
            for left in folders[name]:
                if half := _half(name, left, saves):
                    return half
        if new and new not in folders:
            return f"no {new}"
    return None


# --------------------------------------------------------------------------------------------------------- judges


def _runs(answer: Answer) -> list[dict[str, Any]]:
    return answer.evidence[0].notes.get("disk") or [{"kill_at": 0, "log": []}]


def _old(inputs: Mapping[str, Any]) -> str:
    return f"step-{inputs['step'] - 10}"


def _bytes(inputs: Mapping[str, Any]) -> dict[str, bytes]:
    return {path: text.encode() for path, text in inputs["before"].items()}


def _after(inputs: Mapping[str, Any], log: list[Any]) -> Disk:
    """The disk after a log without deaths."""
    disk = Disk(_bytes(inputs))
    for _, now in replay(_bytes(inputs), [tuple(one) for one in log]):
        disk = now
    return disk


def _said(change: tuple[str, ...]) -> str:
    what, *args = change
    return f"{what}({', '.join(repr(arg) for arg in (args[:1] if what == 'write' else args))})"


def _published(answer: Answer) -> str | None:
    """Check what a reader finds after a save that nothing has disturbed."""
    inputs, saves, new = answer.inputs, _saves(answer.inputs), f"step-{answer.inputs['step']}"
    log = _runs(answer)[0]["log"]
    disk = _after(inputs, log)
    folders = disk.now()
    if new not in folders:
        return f"there is no folder {new} after the save"
    if half := _seen(folders, saves, _old(inputs)):
        return f"after the save there is {half}"
    if hidden := [name for name in disk.names() if name.startswith(".")]:
        return f"after the save {hidden[0]} is still there"
    return f"a save that makes {len(log)} changes" if len(log) > _MOST else None


def _killed(answer: Answer) -> str | None:
    """Check what programs find after each death."""
    if wrong := _published(answer):
        return wrong
    inputs, saves, old = answer.inputs, _saves(answer.inputs), _old(answer.inputs)
    first, *others = _runs(answer)
    deaths = len(first["log"])
    said = [*(answer.value if isinstance(answer.value, list) else []), *[""] * 2 * _MOST]
    if [one["kill_at"] for one in others] != 2 * [*range(1, deaths + 2)]:
        return "it goes on after it was killed"
    for at, (number, step, run) in enumerate(_after_deaths(answer)):
        then, new = ("the next save", "the same step, saved again,")[step == inputs["step"]], f"step-{step}"
        change = _said(tuple(first["log"][number - 1]))
        died = run["log"].index(["restart"])
        if died != number or [one[0] for one in run["log"][:died]] != [one[0] for one in first["log"][:died]]:
            return "it goes on after it was killed, or does other things each time"
        disk = Disk(_bytes(inputs), kill_at=number)
        _run(disk, run["log"][:died])
        if half := _seen(disk.now(), saves, old):
            return f"killed at change {number}, {change}: there is {half}"
        if said[at]:
            return f"killed at change {number}, {change}: {then} ends in {said[at]}"
        disk.restart()
        _run(disk, run["log"][died + 1 :])
        if half := f"no {new}" if new not in disk.now() else _seen(disk.now(), saves, old):
            return f"killed at change {number}, {change}: after {then.rstrip(',')} there is {half}"
        hidden = [name for name in disk.names() if name.startswith(".")]
        if hidden and run["log"][died + 1 :]:
            return f"killed at change {number}, {change}: {hidden[0]} is still there after {then.rstrip(',')}"
    return None


def _after_deaths(answer: Answer) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (the change at which it was killed, the step that was saved then, the run) for every death."""
    first, *others = _runs(answer)
    deaths, step = len(first["log"]), answer.inputs["step"]
    for place, then in ((0, step + 10), (deaths + 1, step)):
        for number, run in enumerate(others[place : place + deaths], 1):
            yield number, then, run


def _run(disk: Disk, log: list[Any]) -> None:
    """Repeat what a program did, up to its death."""
    from course.lab08.disk import Killed

    try:
        for what, *args in log:
            getattr(disk, what)(*([args[0], args[1].encode("latin-1")] if what == "write" else args))
    except Killed:
        pass


def _without_power(answer: Answer) -> str | None:
    """Check what can be left after each change, by a save on the first disk and by one on a disk that a death has
    left."""
    if wrong := _published(answer):
        return wrong
    inputs, saves, old = answer.inputs, _saves(answer.inputs), _old(answer.inputs)
    for number, (change, disk) in enumerate(replay(_bytes(inputs), _log(answer)), 1):
        if half := _cut(disk, saves, old):
            return f"the power fails after change {number}, {_said(change)}: there may be {half}"
    for number, _, run in _after_deaths(answer):
        died = run["log"].index(["restart"])
        disk = Disk(_bytes(inputs), kill_at=number)
        _run(disk, run["log"][:died])
        disk.restart()
        for change in run["log"][died + 1 :]:
            _run(disk, [change])
            if half := _cut(disk, saves, old):
                return (f"killed at change {number}, saved again, and the power fails after {_said(tuple(change))}: "
                        f"there may be {half}")  # fmt: skip
    return None


def _log(answer: Answer) -> list[tuple[str, ...]]:
    return [tuple(one) for one in _runs(answer)[0]["log"]]


def _stays(answer: Answer) -> str | None:
    """Check what can be left when the save has returned."""
    if wrong := _published(answer):
        return wrong
    inputs, new = answer.inputs, f"step-{answer.inputs['step']}"
    disk = _after(inputs, _runs(answer)[0]["log"])
    half = _cut(disk, _saves(inputs), _old(inputs), new)
    return f"the save has returned and the power fails: there may be {half}" if half else None


# ---------------------------------------------------------------------------------------------------------- inputs


def _text(draw: Draw) -> str:
    return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(draw.integer(4, 12)))


def _some(draw: Draw) -> dict[str, Any]:
    step, ranks, then = 10 * draw.integer(2, 9), draw.integer(1, 3), draw.integer(1, 3)
    old = {name: _text(draw) for name in ("manifest", "shard-0", "shard-1")}
    return {
        "before": {f"step-{step - 10}/{name}": text for name, text in old.items()}, "step": step,
        "files": {"manifest": _text(draw), **{f"shard-{r}": _text(draw) for r in range(ranks)}},
        "later": {**{f"part-{r}": _text(draw) for r in range(then)}, "manifest": _text(draw)},
    }  # fmt: skip


def _three(draw: Draw) -> dict[str, Any]:
    """Draw a step number with more digits than the older one, and more files than the next save."""
    inputs = _some(draw)
    old = {re.sub(r"step-\d+", "step-90", path): text for path, text in inputs["before"].items()}
    return {**inputs, "before": old, "step": 100, "files": {f"shard-{r}": _text(draw) for r in range(3)},
            "later": {"shard-0": _text(draw)}}  # fmt: skip


_TINY = {
    "before": {"step-10/shard-0": "old one", "step-10/manifest": "of step 10"}, "step": 20,
    "files": {"shard-0": "numbers", "manifest": "of step 20"}, "later": {"shard-0": "more", "manifest": "of step 30"},
}  # fmt: skip

SAVE = Exercise(
    "save_checkpoint",
    drive=_drive,
    cases=[
        Case("step 20, two files, beside step 10", _TINY, accept=[_published], fixed=[]),
        Case("killed at each of its changes; then the next step is saved, or this one again", _some, points=3,
             hidden=True, accept=[_killed], draws=1, fixed=[_three]),
        Case("the power fails after each of its changes", _some, points=3, hidden=True, accept=[_without_power],
             draws=1, fixed=[_three]),
        Case("the power fails when the save has returned", _some, points=2, hidden=True, accept=[_stays], draws=1,
             fixed=[_three]),
    ],
    errors={
        "FileNotFoundError": "A file needs its folder first, and after a rename the old name is gone.",
    },
    idea="Which single change makes the checkpoint visible, and what must the disk have confirmed before it?",
    hint="Remove every folder whose name begins with a dot, file by file. mkdir .step-N; write and fsync each file; "
    "fsync the folder .step-N, which confirms the names in it; rename it to step-N; fsync the root, \"\".",
)  # fmt: skip
