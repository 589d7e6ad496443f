"""Lab 08, an atomic save: the program is killed at every change, and its power is cut after every change.

The disk notes every change, and kills the program at one (`course.lab08.disk`). The program runs once to its end. Then
it is killed at its first change, its second, ..., on a fresh disk each time.
After each death a new program saves on the same disk: the next step; and, on a disk with the same death, the same step
once more, as a run does that resumes from the older checkpoint, perhaps on other ranks: with other files. From the
notes the judge computes what a power cut can leave after each change.

| asked                                          | how it is seen                                                   |
|------------------------------------------------|------------------------------------------------------------------|
| the checkpoint is there, and the older one too | the disk at the end                                              |
| killed anywhere: nothing half is visible       | folders `step-*` after each death: exactly the files of one save |
| and the next save is not in the way of it      | the program after each death ends, and leaves no hidden folder   |
| no power: nothing half is visible              | all that can be left after each change                           |
| what has returned stays                        | all that can be left at the end                                  |
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from course.lab08.disk import Disk, Killed, Left
from labkit.exercises import Answer, Case, Draw, Exercise

_MOST = 100  # changes of a save


def _drive(exercise: Any, before: Any, step: int, files: Any, later: Any, again: Any) -> Any:
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
    for then in ((step + 10, later), (step, again)):
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


def _saves(inputs: Mapping[str, Any], files: str = "files") -> dict[str, dict[str, bytes]]:
    """Every checkpoint that there may be, as {folder: its files}; the step has `files`, or those of `again`."""
    found: dict[str, dict[str, bytes]] = {}
    for path, text in inputs["before"].items():
        folder, _, name = path.rpartition("/")
        found.setdefault(folder, {})[name] = text.encode()
    for step, texts in ((inputs["step"], inputs[files]), (inputs["step"] + 10, inputs["later"])):
        found[f"step-{step}"] = {name: text.encode() for name, text in texts.items()}
    return found


def _half(folder: str, left: Left, saves: Mapping[str, Mapping[str, bytes]]) -> str | None:
    """Say what is wrong with a folder that a reader sees."""
    want = saves.get(folder)
    if want is None:
        return f"a folder {folder}, which is no checkpoint that was saved"
    if missing := sorted(want.keys() - left.files.keys()):
        return f"{folder} without its file {missing[0]}"
    if more := sorted(left.files.keys() - want.keys()):
        return f"{folder} with {more[0]}, which is not part of this save"
    for name, data in want.items():
        if other := left.files[name] - {data}:
            shortest = min(other, key=len)
            what = "nothing" if not shortest else "half of its bytes" if data.startswith(shortest) else "other bytes"
            return f"{folder} with {what} in its file {name}"
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


def _disk(answer: Answer, kill_at: int = 0) -> Disk:
    """As it is before the first save."""
    return Disk({path: text.encode() for path, text in answer.inputs["before"].items()}, kill_at)


def _run(disk: Disk, log: list[Any]) -> Disk:
    """Repeat what a program did, up to its death."""
    with contextlib.suppress(Killed):
        for what, *args in log:
            getattr(disk, what)(*([args[0], args[1].encode("latin-1")] if what == "write" else args))
    return disk


def _said(change: list[str]) -> str:
    what, *args = change
    return f"{what}({', '.join(repr(arg) for arg in (args[:1] if what == 'write' else args))})"


def _hidden(disk: Disk) -> str:
    return next((name for name in disk.names() if name.startswith(".")), "")


def _published(answer: Answer) -> str | None:
    """Check what a reader finds after a save that nothing has disturbed."""
    inputs, saves, new = answer.inputs, _saves(answer.inputs), f"step-{answer.inputs['step']}"
    log = _runs(answer)[0]["log"]
    disk = _run(_disk(answer), log)
    if new not in disk.now():
        return f"there is no folder {new} after the save"
    if half := _seen(disk.now(), saves, _old(inputs)):
        return f"after the save there is {half}"
    if hidden := _hidden(disk):
        return f"after the save {hidden} is still there"
    return f"a save that makes {len(log)} changes" if len(log) > _MOST else None


@dataclasses.dataclass
class _Death:
    """A program that died, on a disk as it was then, and the one that saved afterwards."""

    change: str  # at which it died
    disk: Disk
    early: list[Any]  # what it has done
    step: int  # that was saved then
    saves: dict[str, dict[str, bytes]]  # what there may be from then on
    later: list[Any]  # what was done then


def _deaths(answer: Answer) -> Iterator[_Death]:
    """Those before the next step was saved; then those before the same step was saved again."""
    first, *others = _runs(answer)
    deaths, step = len(first["log"]), answer.inputs["step"]
    for place, then, files in ((0, step + 10, "files"), (deaths + 1, step, "again")):
        for number, run in enumerate(others[place : place + deaths], 1):
            died = run["log"].index(["restart"])
            disk = _run(_disk(answer, kill_at=number), run["log"][:died])
            change = f"killed at change {number}, {_said(first['log'][number - 1])}"
            early, later = run["log"][:died], run["log"][died + 1 :]
            yield _Death(change, disk, early, then, _saves(answer.inputs, files if later else "files"), later)


def _killed(answer: Answer) -> str | None:
    """Check what programs find after each death."""
    if wrong := _published(answer):
        return wrong
    inputs, saves, old = answer.inputs, _saves(answer.inputs), _old(answer.inputs)
    first, *others = _runs(answer)
    if [one["kill_at"] for one in others] != 2 * [*range(1, len(first["log"]) + 2)]:
        return "it goes on after it was killed"
    said = [*(answer.value if isinstance(answer.value, list) else []), *[""] * 2 * _MOST]
    for at, death in enumerate(_deaths(answer)):
        then, new = ("the next save", "the same step, saved again")[death.step == inputs["step"]], f"step-{death.step}"
        if [one[0] for one in death.early] != [one[0] for one in first["log"][: at % len(first["log"]) + 1]]:
            return "it goes on after it was killed, or does other things each time"
        if half := _seen(death.disk.now(), saves, old):
            return f"{death.change}: at that moment there is {half}"
        if said[at]:
            return (
                f"{death.change}: {then}{',' * (death.step == inputs['step'])} does not return, it ends in {said[at]}"
            )
        death.disk.restart()
        folders = _run(death.disk, death.later).now()
        if half := f"no {new}" if new not in folders else _seen(folders, death.saves, old):
            return f"{death.change}: after {then}{',' * (death.step == inputs['step'])} there is {half}"
        if death.later and (hidden := _hidden(death.disk)):
            return f"{death.change}: {hidden} is still there after {then}"
    return None


def _without_power(answer: Answer) -> str | None:
    """Check what can be left after each change, by a save on the first disk and by one on a disk that a death has
    left."""
    if wrong := _published(answer):
        return wrong
    saves, old, disk = _saves(answer.inputs), _old(answer.inputs), _disk(answer)
    for number, change in enumerate(_runs(answer)[0]["log"], 1):
        if half := _cut(_run(disk, [change]), saves, old):
            return f"the power fails after change {number}, {_said(change)}: there may be {half}"
    for death in _deaths(answer):
        death.disk.restart()
        for change in death.later:
            if half := _cut(_run(death.disk, [change]), death.saves, old):
                return f"{death.change}; saved again, the power fails after {_said(change)}: there may be {half}"
    return None


def _stays(answer: Answer) -> str | None:
    """Check what can be left when the save has returned."""
    if wrong := _published(answer):
        return wrong
    inputs, new = answer.inputs, f"step-{answer.inputs['step']}"
    half = _cut(_run(_disk(answer), _runs(answer)[0]["log"]), _saves(inputs), _old(inputs), new)
    return f"the save has returned and the power fails: there may be {half}" if half else None


# ---------------------------------------------------------------------------------------------------------- inputs


def _text(draw: Draw) -> str:
    return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(draw.integer(4, 12)))


def _some(draw: Draw) -> dict[str, Any]:
    step, ranks, then, fewer = 10 * draw.integer(2, 9), draw.integer(2, 3), draw.integer(1, 3), draw.integer(1, 2)
    old = {name: _text(draw) for name in ("manifest", "shard-0", "shard-1")}
    return {
        "before": {f"step-{step - 10}/{name}": text for name, text in old.items()}, "step": step,
        "files": {"manifest": _text(draw), **{f"shard-{r}": _text(draw) for r in range(ranks)}},
        "later": {**{f"part-{r}": _text(draw) for r in range(then)}, "manifest": _text(draw)},
        "again": {**{f"shard-{r}": _text(draw) for r in range(fewer)}, "manifest": _text(draw)},
    }  # fmt: skip


def _three(draw: Draw) -> dict[str, Any]:
    """Draw a step number with more digits than the older one, and more files than the next save."""
    inputs = _some(draw)
    old = {re.sub(r"step-\d+", "step-90", path): text for path, text in inputs["before"].items()}
    return {**inputs, "before": old, "step": 100, "files": {f"shard-{r}": _text(draw) for r in range(3)},
            "later": {"shard-0": _text(draw)}, "again": {"shard-0": _text(draw)}}  # fmt: skip


_TINY = {
    "before": {"step-10/shard-0": "old one", "step-10/manifest": "of step 10"}, "step": 20,
    "files": {"shard-0": "numbers", "manifest": "of step 20"}, "later": {"shard-0": "more", "manifest": "of step 30"},
    "again": {"shard-0": "numbers", "manifest": "of step 20"},
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
