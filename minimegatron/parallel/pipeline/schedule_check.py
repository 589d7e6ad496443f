"""Checks a schedule: whether it can run, and if not, what is wrong, in sentences.

Two orders must fit together: each rank's own list, from top to bottom, and the flow of data, from F to F down the
stages and from B to B back up. A schedule runs if and only if both together have no cycle. Messages add no constraint:
they are sent as soon as they are made, and a rank receives a neighbour's messages in the order in which they were made,
so no message waits behind one that has not been sent. `check` returns sentences. It looks for four kinds of mistakes in
turn, and stops at the first kind that it finds:

| kind       | mistake                                                               |
|------------|-----------------------------------------------------------------------|
| foreign    | an action of an unknown kind, chunk or microbatch                     |
| incomplete | an action that is missing, or that occurs twice                       |
| disordered | on one rank, a backward before its forward, or a W before its B       |
| deadlock   | ranks that wait for each other, reported as a chain round the cycle   |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from minimegatron.errors import ConfigError
from minimegatron.parallel.pipeline.actions import Action, Schedule

MADE = {"F": "activation", "B": "gradient"}
Wait = tuple[int, int, int, int]  # a rank, the place in its list at which it stands, the rank and place that it needs


def check(schedule: Schedule) -> list[str]:
    """What is wrong with the schedule, as sentences; empty if it can run."""
    for find in (_foreign, _incomplete, _disordered, _deadlock):
        problems = list(find(schedule))
        if problems:
            return problems
    return []


def require_runnable(schedule: Schedule) -> Schedule:
    """The schedule itself.

    Raises:
        ConfigError: it cannot run; the message has the sentences of `check` (at most five).
    """
    problems = check(schedule)
    if problems:
        more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
        raise ConfigError(
            f"schedule `{schedule.name}` cannot run: " + "; ".join([*problems[:5], *more]),
            fix="mend the lists; minimegatron.parallel.pipeline.schedule_check.check says when they are right",
        )
    return schedule


def stuck(schedule: Schedule) -> tuple[list[int], list[Wait]]:
    """How many actions each rank can do, and the cycle of waits that stops them; no cycle if all lists run."""
    at = _run_until_stuck(schedule)
    rank = next((rank for rank, row in enumerate(schedule.actions) if at[rank] < len(row)), -1)
    chain: dict[int, Wait] = {}
    while rank >= 0 and rank not in chain:
        other, needed = _waits_for(schedule, at, rank)
        chain[rank] = rank, at[rank], other, schedule.actions[other].index(needed)
        rank = other
    return at, list(chain.values())[list(chain).index(rank) :] if chain else []


def _foreign(schedule: Schedule) -> Iterator[str]:
    """Actions with an unknown kind, microbatch or chunk."""
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind not in ("F", "B", "W"):
                yield f"rank {rank} does {action}, which is none of F, B, W"
            if not 0 <= action.chunk < schedule.v:
                chunks = "only chunk 0" if schedule.v == 1 else f"chunks 0 to {schedule.v - 1}"
                yield f"rank {rank} does {action}, but has {chunks}"
            if action.microbatch < 0:
                yield f"rank {rank} does {action}: microbatches count from 0"


def _incomplete(schedule: Schedule) -> Iterator[str]:
    """Actions that are missing or occur twice: F once on every stage; B once, unless no list has any; W at most
    once."""
    if not schedule.m:
        yield "no rank does anything"
    kinds = "F" if schedule.forward_only else "FB"
    for rank, row in enumerate(schedule.actions):
        counts = Counter(row)
        for action, count in sorted(counts.items()):
            if count > 1:
                places = [i for i, a in enumerate(row) if a == action]
                yield f"rank {rank} does {schedule.label(action)} {count} times (places {_listed(places)} of its list)"
        missing = [
            action
            for kind in kinds
            for i in range(schedule.m)
            for chunk in range(schedule.v)
            if not counts[action := Action(kind, i, chunk)]
        ]
        if missing:
            yield f"rank {rank} never does {_listed(list(map(schedule.label, missing)))}"


def _disordered(schedule: Schedule) -> Iterator[str]:
    """Actions out of order on one rank: B before its F, W before its B."""
    for rank, row in enumerate(schedule.actions):
        place = {action: i for i, action in enumerate(row)}
        for action, i in place.items():
            for other, needed in schedule.needs(rank, action):
                if other == rank and place.get(needed, -1) > i:
                    yield (
                        f"rank {rank} does {schedule.label(action)} before its own {schedule.label(needed)}, "
                        "which it needs"
                    )


def _deadlock(schedule: Schedule) -> Iterator[str]:
    """Run every rank until none can go on; if lists are left, follow the waits from rank to rank round the cycle."""
    at, circle = stuck(schedule)
    if circle:
        yield "deadlock: " + "; ".join(_wait_sentence(schedule, at, wait[0]) for wait in circle)


def _run_until_stuck(schedule: Schedule) -> list[int]:
    """How far each rank gets in its list."""
    done: set[tuple[int, Action]] = set()
    at = [0] * schedule.p
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while at[rank] < len(row) and all(need in done for need in schedule.needs(rank, row[at[rank]])):
                done.add((rank, row[at[rank]]))
                at[rank] += 1
                moved = True
    return at


def _waits_for(schedule: Schedule, at: list[int], rank: int) -> tuple[int, Action]:
    """The (rank, action) that keeps this rank from its next action."""
    needs = schedule.needs(rank, schedule.actions[rank][at[rank]])
    return next((r, a) for r, a in needs if a not in schedule.actions[r][: at[r]])


def _wait_sentence(schedule: Schedule, at: list[int], rank: int) -> str:
    waiting = f"rank {rank}, before {schedule.label(schedule.actions[rank][at[rank]])},"
    other, needed = _waits_for(schedule, at, rank)
    if other == rank:  # in a V, where a rank hands over to itself
        return f"{waiting} needs its own {schedule.label(needed)}, later in its list"
    first = schedule.actions[other][at[other]]
    return (
        f"{waiting} waits for the {MADE[needed.kind]} of microbatch {needed.microbatch} that rank {other} makes in "
        f"{schedule.label(needed)}"
        + (f", which rank {other} does after {schedule.label(first)}" if first != needed else "")
    )


def _listed(words: list) -> str:
    shown = [*map(str, words[:6]), *([f"{len(words) - 6} more"] if len(words) > 6 else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
