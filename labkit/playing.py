"""Play: runs the learner's code in fresh processes; one outcome for each trial, or why there is no answer.

The problem in a sentence: an answer comes from a process that may do anything, so it is read as plain data, and what
the process did is taken from processes that it cannot reach.

| trials of a case    | run in                                    | beside them the judge's own process                |
|---------------------|-------------------------------------------|----------------------------------------------------|
| without ranks       | one process, one after the other          | the emulator, memory or disk (`beside`), if needed |
| on the same ranks   | a process a rank, one after the other     | the broker of their communications (`transport`)   |

| an outcome                              | means                                                                   |
|-----------------------------------------|-------------------------------------------------------------------------|
| `{"answers", "evidence", "changed"}`    | lists by rank; with `log` and `members` if there was a broker           |
| `{"todo": exercise}`                    | a stub has been called                                                  |
| `{"error": text}`                       | no answer, in the learner's own words and lines; `late`: out of time    |

An outcome other than the first kind is the last one of its case. Several ranks that fail are one failure: that of the
rank that failed first, and not because another had gone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from labkit import cuda, player, transport
from labkit.beside import run as beside_run
from labkit.exercises import Exercise
from labkit.fresh import Nursery, Reply
from labkit.nursery import Limits
from labkit.transport_log import Entry
from minimegatron.errors import ranges
from minimegatron.kernels.build import KernelsUnavailable

Plain = dict[str, Any] | None
_SENT = {"answers": "value", "evidence": "evidence", "changed": "changed"}  # by rank, and in what a rank sends
_NAME, _OP = ([field.name for field in dataclasses.fields(Entry)].index(name) for name in ("name", "op"))
_CAUSES = {"SIGFPE": "an integer was divided by 0", "SIGSEGV": "functions that call themselves too often?"}


def compiled(nursery: Nursery, asked: str, cell: str, hidden: str) -> tuple[Plain, Plain]:
    """The libraries of a cell's kernels, or the outcome of every case if they cannot be made.

    Raises:
        KernelsUnavailable: the machine cannot compile, which is no wrong answer.
    """
    if cuda.todo(cell):  # asked here too: a lab that has not been begun needs no compiler
        return {}, {"todo": asked}
    job = {"cell": cell, "header": str(cuda.header()), "hidden": hidden}
    [reply] = nursery.call(cuda.compile_cell, [job], Limits(seconds=cuda.COMPILE_SECONDS))
    said = reply.value if isinstance(reply.value, dict) else {}
    if "libraries" in said:
        return said["libraries"], None
    if "todo" in said:
        return {}, {"todo": asked}
    if "unavailable" in said:
        raise KernelsUnavailable(said["unavailable"], where="kernels", fix="install g++")
    if "error" in said:
        line = _line(cell, said.get("line"))
        return {}, {"error": f"{said['error']}{f' ({line})' if line else ''}"}
    why = f"it was not done after {cuda.COMPILE_SECONDS:g} s" if reply.ended == "late" else reply.ended
    return {}, {"error": f"the compiler gave no answer: {why or 'it sent what cannot be read'}"}


def play(
    nursery: Nursery, asked: Exercise, sources: Mapping[str, str], drawn: list[dict[str, Any]], hidden: str,
    libraries: Plain,
) -> list[dict[str, Any]]:  # fmt: skip
    """An outcome for each trial of a case, up to the first that fails."""
    common: dict[str, Any] = {
        "sources": dict(sources), "exercise": asked.name, "function": asked.function or asked.name,
        "drive": asked.drive_source, "seconds": asked.seconds, "hidden": hidden, "spoil": list(asked.spoil),
        "services": [], "without": list(asked.without),
    }  # fmt: skip
    limits = Limits(seconds=asked.seconds)
    if not drawn[0]["world"]:
        services = ["kernels"] * (libraries is not None) + ["memory"] * bool(asked.memory) + ["disk"] * bool(asked.disk)
        apart = (*asked.memory, asked.disk)
        given = [{k: v for k, v in trial["inputs"].items() if k not in apart} for trial in drawn]
        job = {**common, "world": 0, "strided": [False] * len(drawn), "trials": given, "services": services}
        if not services:
            return _outcomes(nursery.call(player.play, [job], limits), [], len(drawn), asked, sources)
        stays = [{name: trial["inputs"][name] for name in asked.memory} for trial in drawn]
        disks = [trial["inputs"][asked.disk] for trial in drawn] if asked.disk else None
        beside = {"libraries": libraries, "memory": stays if asked.memory else None, "disk": disks, "hidden": hidden,
                  "seconds": asked.seconds}  # fmt: skip
        reply, judged = nursery.call(player.play, [job], limits, beside=(beside_run, beside))
        played = _outcomes([reply], [], len(drawn), asked, sources)
        if judged.ended or not isinstance(judged.value, dict):
            cause = next((f" ({why})" for signal, why in _CAUSES.items() if signal in judged.ended), "")
            return [*played[:-1], {"error": f"the kernel ended the process that ran it: it {judged.ended}{cause}"}]
        if len(judged.value.get("kernels", [])) > len(drawn):
            return [*played[:-1], {"error": "it begins trials of its own"}]
        _witnessed(played, judged.value)
        return played
    outcomes: list[dict[str, Any]] = []
    for _, alike in itertools.groupby(drawn, key=lambda trial: (trial["world"], trial["members"], trial["groups"])):
        if not outcomes or "answers" in outcomes[-1]:
            outcomes += _play_on_ranks(nursery, asked, sources, list(alike), common)
    return outcomes


def _play_on_ranks(
    nursery: Nursery, asked: Exercise, sources: Mapping[str, str], drawn: list[dict[str, Any]], common: dict[str, Any]
) -> list[dict[str, Any]]:
    """Outcomes of trials on the same ranks, one after the other in the same processes, up to the first that fails."""
    world, members = drawn[0]["world"], drawn[0]["members"]
    place = {key: drawn[0][key] for key in ("world", "members", "groups")}
    jobs = [{**common, **place, "strided": [], "trials": []} for _ in range(world)]
    late: dict[int, list[Any]] = {rank: [] for rank in members}
    for trial in drawn:
        for rank, inputs in zip(members, trial["inputs"], strict=True):  # each rank sees its own alone
            jobs[rank]["trials"].append({name: value for name, value in inputs.items() if name != asked.late})
            jobs[rank]["strided"].append(trial["strided"])
            late[rank].append(inputs.get(asked.late, ()))
    *replies, heard = nursery.call(player.play, jobs, Limits(seconds=asked.seconds), beside=(transport.listen, late))
    outcomes = _outcomes(replies, members, len(drawn), asked, sources)
    return [_with_log(one, heard, members, index, index == len(drawn) - 1) for index, one in enumerate(outcomes)]


def _with_log(outcome: dict[str, Any], heard: Reply, members: list[int], index: int, last: bool) -> dict[str, Any]:
    """An outcome on ranks with the broker's log: `log`, of each member; or the reason why it is wrong."""
    if "answers" not in outcome:
        return outcome
    if heard.ended:
        return {"error": f"no answer: the judge's broker {heard.ended}"}
    if last and heard.value["out_of_step"]:
        return {"error": heard.value["out_of_step"]}
    logs = [of_the_call(heard.value["entries"][rank], index, last) for rank in members]
    return {**outcome, "log": logs, "members": members}


def of_the_call(entries: list[list[Any]], index: int, last: bool) -> list[list[Any]]:
    """The entries of a rank between the player's marks of this trial and the next; for the last trial, all that follow.

    A learner's code can set such a mark too: then what it does before the player's own counts in the next trial.
    """
    marks = {one[_OP]: at for at, one in reversed([*enumerate(entries)]) if one[_NAME] == "mark"}  # the first of each
    end = None if last else marks.get(player.begins(index + 1))
    return entries[marks.get(player.begins(index), -1) + 1 : end]


def _witnessed(outcomes: list[dict[str, Any]], said: dict[str, Any]) -> None:
    """Replace what a learner's process says about itself by what the judge's own process saw."""
    launches, moved, runs = (said.get(name, []) for name in ("kernels", "memory", "disk"))
    for index, outcome in enumerate(outcomes):
        for one in outcome.get("evidence", []):
            if isinstance(one, dict):
                one["launches"] = launches[index] if index < len(launches) else []
                one["memory"] = moved[index] if index < len(moved) else None
                one["disk"] = runs[index] if index < len(runs) else None


def _outcomes(
    replies: list[Reply], members: list[int], trials: int, asked: Exercise, sources: Mapping[str, str]
) -> list[dict[str, Any]]:
    """`{"answers", "evidence", "changed"}`, lists by rank, of each trial; at the end perhaps a `_failure`."""
    beside = [reply for rank, reply in enumerate(replies) if members and rank not in members]
    mine = [replies[rank] for rank in members] if members else replies
    failed = _failure(mine, asked, sources) or (_failure(beside, asked, sources) if beside else None)
    done = [_trials_of(reply) for reply in mine]
    if failed is None and any(len(of_rank) != trials for of_rank in done):
        failed = {"error": "no answer: the process sent what cannot be read"}
    together = [
        {key: [one.get(name) for one in ranks] for key, name in _SENT.items()} for ranks in zip(*done, strict=False)
    ]
    for outcome in together:
        _witnessed([outcome], {})
    return [*together[: trials - 1], failed] if failed else together


def _trials_of(reply: Reply) -> list[dict[str, Any]]:
    """The trials that one rank has sent, as far as they are valid."""
    found = reply.value.get("trials") if isinstance(reply.value, dict) else None
    return [one if isinstance(one, dict) else {} for one in found] if isinstance(found, list) else []


def _failure(replies: list[Reply], asked: Exercise, sources: Mapping[str, str]) -> dict[str, Any] | None:
    """`{"todo"}` or `{"error"}` from what the ranks sent; None when all have sent trials."""
    said = [_readable(reply.value) for reply in replies]
    if todo := next((one["todo"] for one in said if "todo" in one), None):
        return {"todo": str(todo)}
    errors = [(bool(said[r].get("peer")), replies[r].order, r) for r in range(len(said)) if "error" in said[r]]
    source = sources[asked.name]
    if errors:
        rank = min(errors)[2]
        same = [r for r, one in enumerate(said) if one.get("error") == said[rank]["error"]]
        text = f"{_who(same, len(said))}{said[rank]['error']}{_at([said[r].get('line') for r in same], same, source)}"
        return {"error": text}
    if any(reply.ended == "late" for reply in replies):
        where = _waiting(replies, asked.name, source)
        return {"error": f"no answer within {asked.seconds:g} s{where}", "late": True}
    for rank, (reply, one) in enumerate(zip(replies, said, strict=True)):
        if reply.ended or "trials" not in one:
            why = reply.ended or "sent what cannot be read"
            return {"error": f"{_who([rank], len(said))}no answer: the process {why}"}
    return None


def _readable(value: Any) -> dict[str, Any]:
    """The reply of a process, if its reasons are those that the player gives; else {}."""
    if not isinstance(value, dict):
        return {}
    fits = all(
        isinstance(value.get(key, kind()), kind) for key, kind in (("todo", str), ("error", str), ("peer", bool))
    )
    return value if fits else {}


def _who(ranks: list[int], world: int) -> str:
    if world == 1:
        return ""
    if len(ranks) == world:
        return "every rank: "
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}: "


def _at(numbers: list[Any], ranks: list[int], source: str) -> str:
    """The lines in which an error was raised, if they are known; one for all ranks, or one of each."""
    lines = [_line(source, number) for number in numbers]
    if len(set(lines)) > 1:
        return f" ({'; '.join(f'rank {rank}: {line}' for rank, line in zip(ranks, lines, strict=True) if line)})"
    return f" ({lines[0]})" if lines[0] else ""


def _line(source: str, number: Any) -> str:
    lines = source.splitlines()
    known = isinstance(number, int) and 1 <= number <= len(lines)
    return f"line {number}: {lines[number - 1].strip()}" if known else ""


def _waiting(replies: list[Reply], exercise: str, source: str) -> str:
    """The line of the learner's code at which each rank waits."""
    places: dict[str, list[int]] = {}
    for rank, reply in enumerate(replies):
        here = (f.line for f in reply.stack if PurePath(f.file).parts[-2:] == ("exercises", f"{exercise}.py"))
        line = next(here, None)
        places.setdefault(_line(source, line) or "outside of this cell", []).append(rank)
    return "".join(f"; {_who(ranks, len(replies)) or 'stuck at '}{place}" for place, ranks in places.items())
