"""Lab 08, a save by many ranks: run in several orders, one of them killed at each of its changes, late, or cut off.

The ranks are simulated (`course.lab08.together`). The judge repeats their changes on a disk of its own, and looks at it
after each of them.

| asked                                      | how it is seen                                                  |
|--------------------------------------------|-----------------------------------------------------------------|
| each rank writes its own shard             | who wrote which file                                            |
| nothing half is ever visible               | all that a power cut can leave after each change                |
| who returns knows that it is safe          | the same, at the moment at which a rank returns                 |
| who is missing is named, by all in one way | a rank dies at each of its changes; the others' errors          |
| no stale word, no stale shard              | two saves with one store; a rank of an older run that writes on |
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from course.lab08.disk import Disk
from labkit.exercises import Answer, Case, Draw, Exercise

from .commit import _cut

_CHANGES = ("mkdir", "write", "fsync", "rename", "remove")
_LONG = 10  # times `seconds`: nobody stays longer


def _drive(
    exercise: Any, what: str, before: Any, step: int, shards: list[str], others: list[str], seconds: float,
    orders: list[int], who: list[int], late: float,
) -> None:  # fmt: skip
    """Let the ranks run as `what` says; the events of each scenario are the evidence."""
    from course.lab08.disk import Disk
    from course.lab08.together import Ranks
    from labkit.tools import note

    def begin(order: int, saves: Any, of: Any, after: Any = None) -> Any:
        """Ranks that will save (step, run, shards) one after the other; `of` has what is special about a rank."""
        disk, events = (after.disk, after.events) if after else (Disk({p: t.encode() for p, t in before.items()}), [])
        ranks = Ranks(disk, order, saves[0][1], events)

        def program(disk: Any, store: Any, rank: int) -> None:
            for number, (step, run, texts) in enumerate(saves):
                if number:
                    events.append([run, rank, ranks.now, "returned"])
                exercise.save_shard(disk, store, rank, len(texts), f"run-{run}", step, texts[rank].encode(), seconds)

        for rank in range(len(saves[0][2])):
            ranks.start(program, rank, **of.get(rank, {}))
        return ranks

    def hopeless(ranks: Any) -> bool:
        """A rank has asked again and again, which takes long."""
        return any("wait for a key" in one[3] for one in ranks.events)

    def tell(title: str, ranks: Any, *saves: Any) -> bool:
        note("scenario", {"title": title, "events": ranks.events, "saves": [list(one) for one in saves]})
        return hopeless(ranks)

    mine, next_one = (step, "a", shards), (step + 10, "a", others)
    for order in orders if what == "saves" else []:
        ranks = begin(order, [mine, next_one], {rank: {"late": late} for rank in who})
        ranks.run()
        if tell("two saves, one after the other", ranks, mine, next_one):
            return
    for order in orders if what == "late" else []:
        ranks = begin(order, [mine], {rank: {"late": late} for rank in who})
        ranks.run()
        title = f"rank {who[0]} begins" if len(who) == 1 else f"ranks {who[0]} and {who[1]} begin"
        tell(f"{title} {late:g} s after the others", ranks, mine)
    for order, rank in [(o, r) for o in orders for r in range(len(shards))] if what == "dies" else []:
        for change in range(1, 60):
            ranks = begin(order, [mine], {rank: {"kill_at": change}})
            ranks.run()
            if not any(one[1] == rank and one[3] == "died" for one in ranks.events):
                break
            again = order == orders[0] and f"step-{step}" not in ranks.disk.names()
            then = (step if again else step + 10, "b", others)
            after = begin(order, [then], {}, ranks)
            after.run()
            if tell(f"rank {rank} dies at its change {change}", ranks, mine, then):
                return
    change, gap = 1, 0  # it goes on so many events after the new run has made, or taken, its first folder
    while what == "stalls" and change < 9:
        ranks = begin(orders[0], [mine], {who[0]: {"stall_at": change}})
        ranks.run()
        fewer = any(one[1] == who[0] and one[3] in ("returned", "died") for one in ranks.events)  # changes than that
        if not fewer and f"step-{step}" in ranks.disk.names():  # they have published without it
            tell(f"rank {who[0]} stalls at its change {change}", ranks, mine)
            ranks.close()
            change, gap = change + 1, 0
            continue
        start = len(ranks.events)
        after = begin(orders[0], [(step, "b", others)], {}, ranks)

        def wakes(events: Any = ranks.events, start: int = start, gap: int = gap) -> bool:
            made = next((at for at in range(start, len(events)) if events[at][3] in ("mkdir", "write")), len(events))
            return len(events) > made + gap

        after.run(wakes)
        goes_on = wakes()
        if not fewer and goes_on:
            ranks.wake()
            ranks.run()
            after.run()
            title = f"rank {who[0]} of a run that has failed goes on with its change {change} while a new run saves"
            tell(title, ranks, (step, "b", others))
        ranks.close()
        if fewer or hopeless(ranks):
            return
        change, gap = (change, gap + 1) if goes_on and gap < 59 else (change + 1, 0)  # else the new run is over by then


# ------------------------------------------------------------------------------------------------------------ judges


def _files(scenario: Mapping[str, Any], run: str, texts: list[str]) -> dict[str, bytes]:
    """The files of a save; the manifest is what the run has written, if it says what it should."""
    shards = {f"shard-{rank}": text.encode() for rank, text in enumerate(texts)}
    want = {name: hashlib.sha256(data).hexdigest() for name, data in shards.items()}
    manifest = b""
    for event in scenario["events"]:
        if event[0] == run and event[3] == "write" and event[4].endswith("/manifest") and _says(event[5], want):
            manifest = event[5].encode("latin-1")
    return {**shards, "manifest": manifest}


def _says(text: str, want: dict[str, str]) -> bool:
    try:
        return bool(json.loads(text) == want)
    except ValueError:
        return False


def _told(event: list[Any]) -> str:
    what, *args = event[3:]
    return f"rank {event[1]}'s {what}({', '.join(map(repr, args[:1] if what == 'write' else args))})"


class _Replay:
    """What a scenario did to the disk, and what can be left of it at each moment."""

    def __init__(self, inputs: Mapping[str, Any], scenario: Mapping[str, Any]) -> None:
        self.title, self.events, self.runs = scenario["title"], scenario["events"], scenario["saves"]
        self.old = f"step-{inputs['step'] - 10}"
        self.disk = Disk({path: text.encode() for path, text in inputs["before"].items()})
        self.saves: dict[str, dict[str, bytes]] = {self.old: {}}
        for path, text in inputs["before"].items():
            self.saves[self.old][path.rpartition("/")[2]] = text.encode()
        self.files = [(f"step-{step}", run, _files(scenario, run, texts)) for step, run, texts in self.runs]
        self.ends = [(run, rank, when, what) for run, rank, when, what, *_ in self.events if what not in _CHANGES]

    def wrong(self, every: bool = True) -> str | None:
        """Say what a power cut may leave: after each change (if `every`), and when a rank has returned."""
        returned = dict[tuple[str, int], int]()
        for event in self.events:
            run, rank, when, what, *args = event
            for folder, of, files in self.files:
                if of == run or run == "b":
                    self.saves[folder] = files
            if what not in _CHANGES:
                if what == "returned":
                    number = returned[run, rank] = returned.get((run, rank), -1) + 1
                    folder = [folder for folder, of, _ in self.files if of == run][number]
                    if half := _cut(self.disk, self.saves, self.old, folder):
                        return f"{self.title}: rank {rank} has returned, and a power cut may leave {half}"
                continue
            getattr(self.disk, what)(*([args[0], args[1].encode("latin-1")] if what == "write" else args))
            if every and (half := _cut(self.disk, self.saves, self.old)):
                return f"{self.title}: after {_told(event)} a power cut may leave {half}"
        return None

    def all_return(self, run: str, ranks: int, saves: int = 1) -> str | None:
        """Say which rank of a run does not return, or what is left when all have."""
        for name, rank, _, how in self.ends:
            if name == run and how != "returned":
                return f"{self.title}{', then all ranks save' * (run == 'b')}: rank {rank} ends in {how}"
        if len([1 for name, *_ in self.ends if name == run]) < ranks * saves:
            return f"{self.title}: not all ranks of it come to an end"
        return None

    def in_vain(self, late: float, seconds: float) -> str | None:
        """Say how long ranks take that are all there after `late`, if something waits for its whole deadline."""
        last = max(when for _, _, when, _ in self.ends)
        if last < late + seconds / 2:
            return None
        return f"{self.title}: all ranks are there after {late:g} s, and the last returns after {last:.0f} s of waiting"

    def left(self) -> str | None:
        """Say which hidden name is left at the end."""
        hidden = next((name for name in self.disk.names() if name.startswith(".")), "")
        return f"{self.title}: at the end {hidden} is still there" if hidden else None


def _scenarios(answer: Answer) -> Iterator[_Replay]:
    found = answer.evidence[0].notes.get("scenario", [])
    return (_Replay(answer.inputs, one) for one in found)


def _wanted(answer: Answer) -> str | None:
    """Say what is wrong with who writes what, in a run in which nothing happens."""
    found = answer.evidence[0].notes.get("scenario", [])
    if not any(event[3] in _CHANGES for one in found for event in one["events"]):
        return "no rank changes the disk"
    for _, rank, _, what, *args in found[0]["events"] if answer.inputs["what"] == "saves" else []:
        shard = re.search(r"shard-(\d+)", args[0].rpartition("/")[2]) if what == "write" else None
        if shard and int(shard[1]) != rank:
            return f"rank {rank} writes {args[0]}: each rank writes its own shard"
        if what == "write" and args[0].endswith("/manifest") and (wrong := _misfit(args[1], found[0]["saves"])):
            return wrong
    return None


def _misfit(text: str, saves: list[list[Any]]) -> str | None:
    """Say what is wrong with a manifest, which is to be that of one of the saves."""
    wanted = {
        step: {f"shard-{r}": hashlib.sha256(shard.encode()).hexdigest() for r, shard in enumerate(shards)}
        for step, _, shards in saves
    }
    if any(_says(text, want) for want in wanted.values()):
        return None
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not isinstance(said, dict) or any(said.keys() != want.keys() for want in wanted.values()):
        return f"the manifest is {text!r:.60}: it is to be JSON, {{file: its SHA-256}} of each shard"
    steps = {name: next((step for step, want in wanted.items() if want[name] == said[name]), None) for name in said}
    for name, step in steps.items():
        if step is None:
            return f"the manifest has {said[name]!r:.20} for {name}: it is to be its SHA-256"
    names = {step: name for name, step in steps.items()}
    (one, other), *_ = itertools.combinations(names, 2)
    return (f"the manifest has hashes of two saves: that of {names[one]} is of step {one}, that of {names[other]} of "
            f"step {other}. The store keeps the keys of the save before")  # fmt: skip


def _saves(answer: Answer) -> str | None:
    """Two saves: both are there, whoever runs first."""
    if wrong := _wanted(answer):
        return wrong
    for one in _scenarios(answer):
        ranks = len(answer.inputs["shards"])
        if wrong := one.all_return("a", ranks, len(one.runs)) or one.wrong() or one.left():
            return wrong
        if wrong := one.in_vain(answer.inputs["late"], answer.inputs["seconds"]):
            return wrong
    return None


def _blame(one: _Replay, dead: list[int], seconds: float) -> str | None:
    """Say which living rank of the first run does not know who is missing."""
    living = [(rank, when, how) for run, rank, when, how in one.ends if run == "a" and rank not in dead]
    are = "it is rank" if len(dead) == 1 else "they are ranks"
    for rank, when, how in living:
        who = f"{one.title}: rank {rank}"
        if when > _LONG * seconds:
            return f"{who} is still there after {when:.0f} s; the deadline is {seconds:g} s"
        if how == "returned":
            continue
        said = re.search(r"missing: \[([\d, ]*)\]", how)
        if said is None or not how.startswith("TimeoutError"):
            return f"{who} ends in {how}; expected: TimeoutError, missing: {dead}"
        if [int(number) for number in re.findall(r"\d+", said[1])] != dead:
            numbers = " and ".join(map(str, dead))
            return f"{who} says missing: [{said[1]}] where {are} {numbers}"
    if len({how == "returned" for *_, how in living}) > 1:
        return f"{one.title}: some of the other ranks return, others raise. One rank has to decide for all"
    return None


def _late(answer: Answer) -> str | None:
    """A rank or two begin long after the others: the save fails, on them too. (Who calls the roll before the first
    change changes nothing.)"""
    for one in _scenarios(answer):
        if wrong := _blame(one, answer.inputs["who"], answer.inputs["seconds"]) or one.wrong():
            return wrong
        if back := [rank for _, rank, _, how in one.ends if how == "returned"]:
            return f"{one.title}: rank {back[0]} returns, though the save has failed for others"
    return None


def _dies(answer: Answer) -> str | None:
    """One rank dies at each of its changes; then another run saves."""
    if wrong := _wanted(answer):
        return wrong
    ranks, seconds = len(answer.inputs["shards"]), answer.inputs["seconds"]
    for one in _scenarios(answer):
        dead = [next(rank for run, rank, _, how in one.ends if how == "died")]
        if wrong := one.wrong() or _blame(one, dead, seconds) or one.all_return("b", ranks) or one.left():
            return wrong
    return None


def _stalls(answer: Answer) -> str | None:
    """A rank of an older run writes on while a new run saves."""
    if wrong := _wanted(answer):
        return wrong
    ranks = len(answer.inputs["shards"])
    for one in _scenarios(answer):
        new = any(run == "b" for _, run, _ in one.runs)
        if wrong := (one.all_return("b", ranks) if new else None) or one.wrong(every=not new):
            return wrong
    return None


# ------------------------------------------------------------------------------------------------------------ inputs


def _some(draw: Draw, what: str, ranks: int, who: list[int], late: float = 0.0, orders: int = 2) -> dict[str, Any]:
    step = 10 * draw.integer(2, 9)

    def text() -> str:
        return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(draw.integer(4, 9)))

    return {
        "what": what, "before": {f"step-{step - 10}/{name}": text() for name in ("manifest", "shard-0", "shard-1")},
        "step": step, "shards": [text() for _ in range(ranks)], "others": [text() for _ in range(ranks)],
        "seconds": float(draw.integer(10, 60)), "orders": [0, 1, *(draw.integer(2, 99) for _ in range(4))][:orders],
        "who": who, "late": late,
    }  # fmt: skip


def _orders(draw: Draw) -> dict[str, Any]:
    return _some(draw, "saves", 3, [0], orders=6)


def _a_little_late(who: int) -> Any:
    """Return a draw in which a rank begins well within the deadline."""

    def inputs(draw: Draw) -> dict[str, Any]:
        found = _some(draw, "saves", 3, [who])
        return {**found, "late": found["seconds"] / 2}

    return inputs


def _alone(draw: Draw) -> dict[str, Any]:
    return _some(draw, "saves", 1, [0])


def _too_late(draw: Draw) -> dict[str, Any]:
    found = _some(draw, "late", 3, [draw.integer(1, 2)])
    return {**found, "late": 6 * found["seconds"]}


def _two_too_late(draw: Draw) -> dict[str, Any]:
    found = _some(draw, "late", 4, [1, 2])  # neither the first rank nor the last: one of these decides
    return {**found, "late": 6 * found["seconds"]}


def _the_first_too_late(draw: Draw) -> dict[str, Any]:
    found = _some(draw, "late", 4, [0, 2])
    return {**found, "late": 6 * found["seconds"]}


def _both_ends_too_late(draw: Draw) -> dict[str, Any]:
    found = _some(draw, "late", 4, [0, 3])
    return {**found, "late": 6 * found["seconds"]}


def _the_last_too_late(draw: Draw) -> dict[str, Any]:
    found = _some(draw, "late", 4, [1, 3])
    return {**found, "late": 6 * found["seconds"]}


def _a_death(draw: Draw) -> dict[str, Any]:
    return _some(draw, "dies", 3, [0])


def _stalled(draw: Draw) -> dict[str, Any]:
    return _some(draw, "stalls", 2, [1])


_TWO = {
    "what": "saves", "before": {"step-10/shard-0": "old one", "step-10/manifest": "of step 10"}, "step": 20,
    "shards": ["left", "right"], "others": ["LEFT", "RIGHT"], "seconds": 30.0, "orders": [0], "who": [0], "late": 0.0,
}  # fmt: skip

TOGETHER = Exercise(
    "save_shard",
    drive=_drive,
    seconds=60.0,
    cases=[
        Case("two ranks save step 20, then step 30", _TWO, accept=[_saves], fixed=[]),
        Case("three ranks in any order, one of them half a deadline late; one rank alone", _orders, points=2,
             hidden=True, accept=[_saves], draws=1, fixed=[_a_little_late(0), _a_little_late(2), _alone]),
        Case("a rank dies at each of its changes; then another run saves", _a_death, points=3, hidden=True,
             accept=[_dies], draws=1, fixed=[]),
        Case("a rank, or two, begin six deadlines after the others", _too_late, hidden=True, accept=[_late], draws=1,
             fixed=[_two_too_late, _the_first_too_late, _both_ends_too_late, _the_last_too_late]),
        Case("a rank of an older run writes on while a new run saves", _stalled, points=2, hidden=True,
             accept=[_stalls], draws=1),
    ],
    idea="One rank decides. What must it have heard from every rank before the rename, and what must the others have "
    "heard from it before they return?",
    hint="staged = f\".step-{step}.{run}\". Rank 0 removes hidden folders, makes staged, sets f\"{step}/ready\"; the "
    "others wait 3 * seconds for it. Each rank writes and fsyncs its shard, sets f\"{step}/{rank}\" to its SHA-256. "
    "Rank 0 waits for all of these keys for `seconds`; after a TimeoutError those that `check` does not find are "
    "missing. If none is: manifest, fsync, fsync of the folder, rename, fsync of the root. In both cases it sets "
    "f\"{step}/end\" to the list as JSON, for which the others wait 3 * seconds. If no word of rank 0 comes, rank 0 is "
    "missing, and who has not said its own: each says f\"{step}/here/{rank}\" first of all.",
)  # fmt: skip
