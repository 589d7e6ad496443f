"""Play: runs the learner's code in fresh processes; one outcome for each trial, or why there is no answer.

| trials of a case    | run in                                                                               |
|---------------------|--------------------------------------------------------------------------------------|
| without ranks       | one process, one after the other                                                     |
| on the same ranks   | a process a rank, one after the other, with a process group of gloo (`process_group`) |

| an outcome                              | means                                                                   |
|-----------------------------------------|-------------------------------------------------------------------------|
| `{"answers", "evidence", "changed"}`    | lists by rank                                                           |
| `{"todo": exercise}`                    | a stub has been called                                                  |
| `{"error": text}`                       | no answer, in the learner's own words and lines; `late`: out of time;   |
|                                         | `unread`: the cell cannot be read, or has no such function;             |
|                                         | `raised`: the error alone, without lines and ranks                      |

An outcome other than the first kind is the last one of its case. Several ranks that fail are one failure: that of the
rank that failed first, and not because another had gone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from labkit import player
from labkit.exercises import Exercise
from labkit.fresh import Nursery, Reply
from labkit.nursery import Limits
from labkit.process_group import Call
from minimegatron.errors import ranges

_NAME, _GROUP, _WAITED = (
    [field.name for field in dataclasses.fields(Call)].index(name) for name in ("name", "group", "waited")
)
_COMMUNICATE = ("distributed_c10d.py", "collectives.py")  # files whose functions are communications
_PATIENCE = 6.0  # seconds of processor that a known mistake may compute for
_SENT = {"answers": "value", "evidence": "evidence", "changed": "changed"}  # by rank, and in what a rank sends


def play(
    nursery: Nursery, asked: Exercise, sources: Mapping[str, str], drawn: list[dict[str, Any]], hidden: str,
    prepared: Any = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """An outcome for each trial of a case, up to the first that fails.

    Args:
        drawn: the trials, plain.
        hidden: the folder of the checks.
        prepared: for the lab's tools.
    """
    outcomes: list[dict[str, Any]] = []
    for _, alike in itertools.groupby(drawn, key=lambda trial: (trial["world"], trial["members"], trial["groups"])):
        if not outcomes or "answers" in outcomes[-1]:
            outcomes += _play_alike(nursery, asked, sources, list(alike), hidden, prepared)
    return outcomes


def _jobs(
    asked: Exercise, sources: Mapping[str, str], drawn: Sequence[dict[str, Any]], hidden: str, prepared: Any = None
) -> list[dict[str, Any]]:
    """The job of each process, for trials on the same ranks (`player`)."""
    world, members = drawn[0]["world"], drawn[0]["members"]
    common: dict[str, Any] = {
        "sources": dict(sources), "exercise": asked.name, "function": asked.function or asked.name,
        "drive": asked.drive_source, "seconds": asked.seconds, "hidden": hidden,
        "prepared": prepared, "without": list(asked.without),
        **{key: drawn[0][key] for key in ("world", "members", "groups")},
    }  # fmt: skip
    jobs = [{**common, "strided": [], "trials": [], "late": []} for _ in range(world or 1)]
    for trial in drawn:
        given = zip(members, trial["inputs"], strict=True) if world else [(0, trial["inputs"])]
        for rank, inputs in given:  # each rank sees its own alone
            jobs[rank]["trials"].append({name: value for name, value in inputs.items() if name != asked.late})
            jobs[rank]["strided"].append(trial["strided"])
            jobs[rank]["late"].append(inputs.get(asked.late, []))
    return jobs


def _play_alike(
    nursery: Nursery, asked: Exercise, sources: Mapping[str, str], drawn: list[dict[str, Any]], hidden: str,
    prepared: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Outcomes of trials in the same processes, one after the other, up to the first that fails."""
    world, members = drawn[0]["world"], drawn[0]["members"]
    jobs = _jobs(asked, sources, drawn, hidden, prepared)
    replies = nursery.call(player.play, jobs, Limits(seconds=asked.seconds))
    outcomes = _outcomes(replies, members, len(drawn), asked, sources)
    finished = min((len(_trials_of(reply)) for reply in replies if not reply.ended), default=0)
    earlier = drawn[: min(finished, len(drawn) - 1)]
    if earlier and any(_died(reply) for reply in replies):  # one that died has taken its answers with it
        before = _play_alike(nursery, asked, sources, earlier, hidden, prepared)
        return [*before, outcomes[-1]] if "answers" in before[-1] else before
    if world and "answers" in outcomes[-1] and (wrong := _out_of_step(outcomes, replies)):
        return [*outcomes[:-1], {"error": wrong}]
    return outcomes


def vary(
    nursery: Nursery, asked: Exercise, sources: Mapping[str, str], variants: Sequence[str],
    drawn: Sequence[dict[str, Any]], hidden: str,
) -> list[list[Any] | str | None]:  # fmt: skip
    """What each of several texts of the cell gives on each of these trials, by rank or alone; the error that it raises,
    or None if it gives no answer.

    One after the other in the same processes. Where all ranks of one wait, and none uses the processor, it hangs,
    however busy the machine is: then new processes try those behind it.

    Args:
        sources: the lab's other exercises, solved.
        variants: texts of the course's author.
        drawn: the trials, plain.
    """
    found: list[list[Any] | str | None] = [[] for _ in variants]
    places = [(trial["world"], trial["members"], trial["groups"]) for trial in drawn]
    for key, alike in itertools.groupby(range(len(drawn)), key=lambda at: places[at]):
        trials = [drawn[at] for at in alike]
        left = [number for number, values in enumerate(found) if isinstance(values, list)]
        while left:
            said = _say(nursery, asked, sources, [variants[number] for number in left], trials, hidden)
            mine = [said[rank] for rank in key[1]] if key[0] else said
            whole = min(map(len, said))  # the next one, if there is one, hangs, or has ended a process
            for place, number in enumerate(left[: whole + 1]):
                by_rank = [of_rank[place] if place < len(of_rank) else None for of_rank in mine]
                found[number] = _together(found[number], by_rank, on_ranks=bool(key[0]))
            left = left[whole + 1 :]
    return found


def _say(
    nursery: Nursery, asked: Exercise, sources: Mapping[str, str], variants: list[str],
    trials: Sequence[dict[str, Any]], hidden: str,
) -> list[list[Any]]:  # fmt: skip
    """What each rank says to the variants, up to the first that hangs."""
    seconds = asked.seconds * (1 + len(variants))
    jobs = [
        {**job, "variants": variants, "patience": _PATIENCE, "seconds": seconds}
        for job in _jobs(asked, sources, trials, hidden)
    ]
    replies = nursery.call(player.vary, jobs, Limits(seconds=seconds))
    return [reply.value if isinstance(reply.value, list) else [] for reply in replies]


def _together(before: Any, by_rank: list[Any], on_ranks: bool) -> list[Any] | str | None:
    """The values of earlier trials and of these; or the error of the first rank that another has not caused."""
    if not all(isinstance(one, list) for one in by_rank):
        own = [one["error"] for one in by_rank if isinstance(one, dict) and not one["peer"]]
        return own[0] if own else None
    return [*before, *(list(ranks) if on_ranks else ranks[0] for ranks in zip(*by_rank, strict=True))]


def _out_of_step(outcomes: list[dict[str, Any]], replies: list[Reply]) -> str:
    """What would hang the next program: a group that only some ranks have made, a collective that only some have
    started; or ""."""
    made = [reply.value.get("groups", 0) for reply in replies]
    if len(set(made)) > 1:
        more = max(made) - min(made)
        return (
            f"some ranks have made more groups than others ({more} more); the next group would hang: "
            "every rank calls dist.new_group for each group, its members or not"
        )
    started: dict[tuple[int, ...], Counter[int]] = {}
    for outcome in outcomes:
        for place, one in enumerate(outcome["evidence"]):
            for call in one["calls"]:
                if call[_NAME] not in ("send", "recv"):
                    started.setdefault(tuple(call[_GROUP]), Counter())[place] += 1
    for group, counts in started.items():
        if len({counts[place] for place in group if place >= 0}) > 1:
            where = "the world" if len(group) == len(replies) else f"group {list(group)}"
            return (
                f"after the call the ranks no longer meet in {where}: some have started a communication that others "
                "have not"
            )
    return ""


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
    source, waiting = sources[asked.name], ("late", "stuck")
    late = {"late": True} if any(reply.ended == "late" for reply in replies) else {}
    errors = [(bool(said[r].get("peer")), replies[r].order, r) for r in range(len(said)) if "error" in said[r]]
    gone = [r for r, one in enumerate(said) if "trials" not in one and replies[r].ended not in waiting]
    if errors and not (gone and min(errors)[0]):  # where one has gone, the others' lost connections are a consequence
        rank = min(errors)[2]
        same = [r for r, one in enumerate(said) if one.get("error") == said[rank]["error"]]
        text = f"{_who(same, len(said))}{said[rank]['error']}{_at([said[r].get('line') for r in same], same, source)}"
        return {"error": text, "unread": bool(said[rank].get("unread")), "raised": said[rank]["error"]}
    if gone:
        why = replies[gone[0]].ended or "sent what cannot be read"
        if why.endswith("SIGABRT") and len(said) > 1:
            why += "; gloo ends a rank so that gets a message longer than the tensor that receives it"
        return {"error": f"{_who(gone[:1], len(said))}no answer: the process {why}", **late}
    if any(reply.ended in waiting for reply in replies):
        what = f"no answer within {asked.seconds:g} s" if late else "deadlock: nothing goes on any more"
        return {"error": f"{what}{_waiting(replies, asked.name, source)}", **late}
    return None


def _died(reply: Reply) -> bool:
    return reply.ended not in ("", "late", "stuck")


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


def _left(reply: Reply) -> str:
    """The communications that a rank which has returned never waited for, in words."""
    calls = [call for one in _trials_of(reply)[-1:] for call in one["evidence"]["calls"]]
    names = sorted({call[_NAME] for call in calls if call[_WAITED] is None})
    return f", and never waited for its {', '.join(names)}" if names else ""


_ALONE = {"line": "stuck at ", "in": "stuck ", "outside": "stuck "}  # of one process: before the first word of a place


def _waiting(replies: list[Reply], exercise: str, source: str) -> str:
    """Where each rank is: the line of the learner's code, what it calls outside of it, or that it has returned, and
    what it has not waited for."""
    places: dict[str, list[int]] = {}
    for rank, reply in enumerate(replies):
        here = (f.line for f in reply.stack if PurePath(f.file).parts[-2:] == ("exercises", f"{exercise}.py"))
        called = (f"in {f.function}, " for f in reply.stack if PurePath(f.file).name in _COMMUNICATE)
        backward = any(f.function == "_engine_run_backward" for f in reply.stack)
        outside = f"{next(called, '')}{'in the backward pass' if backward else 'outside of this cell'}"
        where = _line(source, next(here, None)) or (outside if reply.stack else "does not answer")
        where = where if reply.ended else f"has returned{_left(reply)}"
        places.setdefault(where, []).append(rank)
    return "".join(
        f"; {_who(ranks, len(replies)) or _ALONE.get(place.split()[0], 'it ')}{place}"
        for place, ranks in places.items()
    )
