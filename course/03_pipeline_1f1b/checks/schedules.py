"""Lab 03, schedules as lists: GPipe, 1F1B, interleaved, ZB-H1.

A list of actions has no single right answer, so a schedule is judged by what it does: the checker says whether it runs,
the simulator how long it takes, and counting how many activations each rank keeps. All three are the package's own,
beside the schedules that it runs. A rule is a function of the schedule and of what the case asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from labkit.exercises import Accept, Answer, Case, Draw, Exercise
from minimegatron.errors import ConfigError
from minimegatron.parallel.actions import Action, Schedule, round_robin
from minimegatron.parallel.schedule_check import check, peak_live
from minimegatron.parallel.schedule_sim import Costs, simulate

# ----------------------------------------------------------------------------------- lists: how they are judged


def _read(answer: Answer, v: int) -> Schedule:
    """The learner's lists as a schedule.

    Raises:
        ConfigError: they are no lists of actions, or of another number of microbatches.
    """
    rows = [_actions(row, rank) for rank, row in enumerate(answer.value)]
    schedule = Schedule("yours", tuple(rows), round_robin(len(rows), v))
    if schedule.m != answer.inputs["m"]:
        raise ConfigError(f"it runs {schedule.m} microbatches, not {answer.inputs['m']}")
    return schedule


def _actions(row: Any, rank: int) -> tuple[Action, ...]:
    """A list of words such as F0 or B3.1, or one string of them."""
    if not isinstance(row, str | list | tuple) or not all(isinstance(word, str) for word in row):
        raise ConfigError(f'rank {rank}: a list of words is wanted, such as ["F0", "B0"]')
    return tuple(map(Action.parse, row.split() if isinstance(row, str) else row))


def _judged(*rules: Callable[[Schedule, dict[str, Any]], str | None]) -> Accept:
    """The lists run, and each rule is satisfied with them."""

    def accept(answer: Answer) -> str | None:
        try:
            schedule = _read(answer, answer.inputs.get("v", 1))
        except ConfigError as error:
            return error.what
        problems = check(schedule)
        if problems:
            return problems[0]
        return next(filter(None, (rule(schedule, answer.inputs) for rule in rules)), None)

    return accept


def _no_longer(bound: Callable[..., Fraction | int]) -> Callable[[Schedule, dict[str, Any]], str | None]:
    """With F = B = W = 1 for a whole rank it takes no more than the bound."""

    def rule(schedule: Schedule, inputs: dict[str, Any]) -> str | None:
        takes = simulate(schedule, Costs().divided(schedule.v)).makespan
        within = bound(**inputs)
        if takes > within:
            return f"it takes {float(takes):g} steps (F 1, whole backward 2); {float(within):g} are enough"
        return None

    return rule


def _keeps(bound: Callable[..., int]) -> Callable[[Schedule, dict[str, Any]], str | None]:
    """No rank keeps more activations than the bound."""

    def rule(schedule: Schedule, inputs: dict[str, Any]) -> str | None:
        for rank, most in enumerate(peak_live(schedule)):
            enough = bound(rank, **inputs)
            if most > enough:
                return f"rank {rank} keeps {most} activations at a time; {enough} are enough"
        return None

    return rule


def _forwards_first(schedule: Schedule, inputs: dict[str, Any]) -> str | None:
    for rank, row in enumerate(schedule.actions):
        kinds = "".join(a.kind for a in row)
        if "BF" in kinds:
            return f"rank {rank} goes back before its last forward; GPipe does all forwards first"
    return None


def _all_split(schedule: Schedule, inputs: dict[str, Any]) -> str | None:
    for rank in range(schedule.p):
        for i in range(schedule.m):
            if not schedule.is_split(i, rank):
                return f"rank {rank} has a B{i} but no W{i}: every backward is to be split"
    return None


def _whole(schedule: Schedule, inputs: dict[str, Any]) -> str | None:
    return "it holds a W; here a backward is undivided" if schedule.splits else None


def _few(draw: Draw) -> dict[str, Any]:
    p = draw.integer(3, 6)
    return {"p": p, "m": draw.integer(1, p - 2)}


def _many(draw: Draw) -> dict[str, Any]:
    p = draw.integer(2, 6)
    return {"p": p, "m": draw.integer(2 * p, 3 * p)}


# -------------------------------------------------------------------------------------------------------- GPipe


def _drive_gpipe(exercise: Any, p: int, m: int) -> list[Any]:
    return [exercise.gpipe(rank, p, m) for rank in range(p)]


GPIPE = Exercise(
    "gpipe",
    drive=_drive_gpipe,
    accept=[_judged(_whole, _forwards_first, _no_longer(lambda p, m: 3 * (m + p - 1)))],
    cases=[
        Case("2 ranks, 3 microbatches", {"p": 2, "m": 3}),
        Case("fewer microbatches than ranks", _few, hidden=True),
        Case("more", _many, points=2, hidden=True),
    ],
    hint="Every rank has the same list: F of all m microbatches, then B of all m, in an order that all ranks share.",
)

# --------------------------------------------------------------------------------------------------------- 1F1B


def _drive_1f1b(exercise: Any, p: int, m: int) -> list[Any]:
    return [exercise.one_f_one_b(rank, p, m) for rank in range(p)]


_MEMORY = _keeps(lambda rank, p, m: min(m, p - rank))
_TIME = _no_longer(lambda p, m: 3 * (m + p - 1))

ONE_F_ONE_B = Exercise(
    "one_f_one_b",
    drive=_drive_1f1b,
    accept=[_judged(_whole)],
    cases=[
        Case("2 ranks, 4 microbatches: it runs", {"p": 2, "m": 4}),
        Case("more microbatches than ranks: it runs", _many, hidden=True),
        Case("fewer: it runs", _few, hidden=True),
        Case("it takes no longer than GPipe", _many, hidden=True, accept=[_judged(_TIME)]),
        Case("rank r keeps at most p - r activations", _many, points=2, hidden=True, accept=[_judged(_TIME, _MEMORY)]),
    ],
    hint="Rank r does min(m, p-r-1) forwards to warm up. Then a forward and a backward in turn while forwards are "
    "left, then the backwards that remain.",
)

# -------------------------------------------------------------------------------------------------- interleaved


def _drive_interleaved(exercise: Any, p: int, m: int, v: int) -> list[Any]:
    return [exercise.interleaved(rank, p, m, v) for rank in range(p)]


def _chunked(draw: Draw) -> dict[str, Any]:
    p = draw.integer(2, 4)
    return {"p": p, "m": p * draw.integer(2, 4), "v": draw.integer(2, 3)}


def _one_group(draw: Draw) -> dict[str, Any]:
    p = draw.integer(2, 4)
    return {"p": p, "m": p, "v": draw.integer(2, 4)}


_FASTER = _no_longer(lambda p, m, v: 3 * m + Fraction(3 * (p - 1), v))
_WARM = _keeps(lambda rank, p, m, v: min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1))

INTERLEAVED = Exercise(
    "interleaved",
    drive=_drive_interleaved,
    accept=[_judged(_whole)],
    cases=[
        Case("2 ranks, 4 microbatches, 2 chunks: it runs", {"p": 2, "m": 4, "v": 2}),
        Case("other sizes: it runs", _chunked, hidden=True),
        Case("as many microbatches as ranks: it runs", _one_group, hidden=True),
        Case("the bubble is (p-1)/(vm)", _chunked, points=2, hidden=True, accept=[_judged(_FASTER)]),
        Case("no more activations than warm-up + 1", _chunked, hidden=True, accept=[_judged(_FASTER, _WARM)]),
    ],
    hint="One table for all ranks: for each group of p microbatches, for each chunk, for each microbatch of the group. "
    "F(k) is table[k]; B(k) is the same microbatch with chunk v-1-c. Warm up with 2(p-r-1) + (v-1)p forwards, "
    "at most all of them, then F and B in turn.",
)

# -------------------------------------------------------------------------------------------------------- ZB-H1


def _drive_zb(exercise: Any, p: int, m: int) -> list[Any]:
    return [exercise.zb_h1(rank, p, m) for rank in range(p)]


_THIRD = _no_longer(lambda p, m: 3 * m + p - 1)
_AS_BEFORE = _keeps(lambda rank, p, m: min(m, p))

ZB_H1 = Exercise(
    "zb_h1",
    drive=_drive_zb,
    accept=[_judged(_all_split)],
    cases=[
        Case("2 ranks, 4 microbatches: it runs, every backward split", {"p": 2, "m": 4}),
        Case("other sizes: it runs", _many, hidden=True),
        Case("fewer microbatches than ranks: it runs", _few, hidden=True),
        Case("a third of 1F1B's bubble", _many, points=2, hidden=True, accept=[_judged(_THIRD)]),
        Case("no rank keeps more than p activations", _many, hidden=True, accept=[_judged(_THIRD, _AS_BEFORE)]),
    ],
    hint="Start from your 1F1B. Rank r does W of a microbatch r microbatches later: after B of microbatch i, do W of "
    "i - r (if there is one); what is left of W comes at the end.",
)
