"""Lab 03, schedules as lists: GPipe, 1F1B, interleaved, ZB-H1, and one that beats it.

There are several right lists, so a schedule is judged by what it does: the checker says whether it runs, the simulator
how long it takes, and a count how many activations each rank keeps. All three are the package's own. A rule is a
function of the schedule and of its sizes.

A list costs microseconds, so a case asks for the lists of all sizes in a range, and names the first that is wrong.
Sizes drawn outside of the range find an answer that was made for the range.

The package generates the same lists. Its generators are closed while these exercises run (`Exercise.without`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

from course.lab03.placing import half_w, placed
from labkit.exercises import Accept, Answer, Case, Draw, Exercise
from minimegatron.errors import ConfigError
from minimegatron.parallel.pipeline.actions import Action, Schedule, round_robin
from minimegatron.parallel.pipeline.schedule_check import check
from minimegatron.parallel.pipeline.schedule_sim import Costs, Simulation, TimedAction, peak_live, simulate

Sizes = dict[str, int]
Rule = Callable[[Schedule, Sizes], str | None]

GENERATORS = ("minimegatron.parallel.pipeline.schedules",)

# ----------------------------------------------------------------------------------- lists: how they are judged


def _drive(exercise: Any, function: str, sizes: Any) -> list[Any]:
    """The lists of all ranks, for each of the sizes."""
    return [[getattr(exercise, function)(rank, **one) for rank in range(one["p"])] for one in sizes]


def _read(lists: Any, sizes: Sizes) -> Schedule:
    """The learner's lists as a schedule.

    Raises:
        ConfigError: they are no lists of actions, or of another number of microbatches.
    """
    rows = [_actions(row, rank) for rank, row in enumerate(lists)]
    schedule = Schedule("yours", tuple(rows), round_robin(len(rows), sizes.get("v", 1)))
    most = sizes["m"]
    if beyond := next((a.microbatch for row in rows for a in row if a.microbatch >= most), None):
        there = f"they are {', '.join(map(str, range(most))) if most <= 3 else f'0 to {most - 1}'}"
        raise ConfigError(f"it names microbatch {beyond}; with m={most} {'there is only 0' if most == 1 else there}")
    if schedule.m != most:
        raise ConfigError(f"it runs {schedule.m} microbatches, not {sizes['m']}")
    return schedule


def _actions(row: Any, rank: int) -> tuple[Action, ...]:
    """The actions of a list of words such as F0 or B3.1."""
    if isinstance(row, str):
        raise ConfigError(f'rank {rank}: it returns one string; a list of words is wanted, such as ["F0", "B0"]')
    if isinstance(row, list | tuple) and any(_waits(word) for word in row):
        raise ConfigError(f"rank {rank}: a list has no words for waiting; a rank waits by itself for its next input")
    if not isinstance(row, list | tuple) or not all(isinstance(word, str) for word in row):
        raise ConfigError(f'rank {rank}: a list of words is wanted, such as ["F0", "B0"]')
    try:
        return tuple(map(Action.parse, row))
    except ConfigError as error:
        raise ConfigError(f"rank {rank}: {error.what}") from None


def _waits(word: Any) -> bool:
    """Whether a word stands for a step without work: None, "", "-", "wait" ..."""
    return word is None or (
        isinstance(word, str) and (not any(map(str.isalnum, word)) or word.lower() in ("wait", "idle", "bubble"))
    )


def _runs(rule: Rule, after: Sequence[Sizes] = ()) -> Accept:
    """Accept lists that run for all sizes and follow the rule; else return a sentence that says why not.

    Args:
        rule: beside that they run.
        after: sizes of earlier rows. Their lists are made here as well; where one of them cannot run, the earlier row
            has said why, and this row does not repeat it.
    """

    def accept(answer: Answer) -> str | None:
        asked = list(zip(answer.value, answer.inputs["sizes"], strict=True))
        mine = [(lists, sizes) for lists, sizes in asked if sizes not in after]
        found = next(((sizes, said) for lists, sizes in mine if (said := _unable(lists, sizes, rule))), None)
        if found and any(_unable(lists, sizes, rule) for lists, sizes in asked if sizes in after):
            return f"{_named(found[0])}: it fails here too: see above"
        return found and f"{_named(found[0])}: {found[1]}"

    return accept


def _judged(*rules: Rule, runs: Rule, before: Rule | None = None) -> Accept:
    """Accept lists that follow each rule for all sizes. A problem that an earlier row describes is not described again.

    Args:
        rules: of this row.
        runs: the rule of an earlier row, with `_runs`.
        before: the rule of an earlier row, on which the rules of this row depend.
    """

    def problem(lists: Any, sizes: Sizes) -> str | None:
        if _unable(lists, sizes, runs):
            return "not judged yet: see above"
        schedule = _read(lists, sizes)
        if found := next(filter(None, (rule(schedule, sizes) for rule in rules)), None):
            return found
        if before and before(schedule, sizes):
            return "no points yet: the limit is kept, but counts only for a list as fast as the row above asks"
        return None

    return _for_all(problem)


def _for_all(problem: Callable[[Any, Sizes], str | None]) -> Accept:
    """Return the first problem over all sizes, with the sizes."""

    def accept(answer: Answer) -> str | None:
        for lists, sizes in zip(answer.value, answer.inputs["sizes"], strict=True):
            if found := problem(lists, sizes):
                return f"{_named(sizes)}: {found}"
        return None

    return accept


def _named(sizes: Sizes) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _unable(lists: Any, sizes: Sizes, rule: Rule) -> str | None:
    """Say why the lists cannot run, or do not follow the rule."""
    try:
        schedule = _read(lists, sizes)
    except ConfigError as error:
        return error.what
    if problems := check(schedule):
        return problems[0]
    return "no rank goes back: it holds no B" if schedule.forward_only else rule(schedule, sizes)


def _no_longer(bound: Callable[..., Fraction | int]) -> Rule:
    """A rule: with F = B = W = 1 for a whole rank the schedule takes no longer than the bound."""

    def rule(schedule: Schedule, sizes: Sizes) -> str | None:
        plan, within = simulate(schedule, Costs().divided(schedule.v)), bound(**sizes)
        if plan.makespan > within:
            steps = f"it takes {float(plan.makespan):g} steps (F 1, whole backward 2); {float(within):g} are enough"
            return steps + _in_the_way(plan)
        return None

    return rule


def _in_the_way(plan: Simulation) -> str:
    """The first wait between two actions of a rank that a W could fill, or to which a W of the sender led, as a
    sentence; or nothing."""
    label = plan.schedule.label
    spans = {(s.rank, s.action): s for row in plan.spans for s in row}
    found = []
    for row in plan.spans:
        for at, (before, after) in enumerate(zip(row, row[1:], strict=False), 1):
            if after.start == before.end:
                continue
            sender = max((spans[need] for need in plan.schedule.needs(after.rank, after.action)), key=lambda s: s.end)
            first = _w_ahead_of(sender, plan.spans[sender.rank])
            done = {s.action for s in row[:at]}
            left = [s for s in row[at:] if s.action.kind == "W" and dataclasses.replace(s.action, kind="B") in done]
            why = [f"rank {sender.rank}, which sends it, does {label(first.action)} first"] if first else []
            mine = f"rank {after.rank} could do"
            why += [f"{mine} {label(left[0].action)} meanwhile, but its list has it later"] if left else []
            if why:
                steps = f"from step {float(before.end):g} to {float(after.start):g}"
                waits = f"rank {after.rank} waits {steps} for the input of {label(after.action)}"
                found.append((before.end, after.rank, f"{waits}: {', and '.join(why)}"))
    return f". An example of it: {min(found)[-1]}" if found else ""


def _w_ahead_of(one: TimedAction, row: Sequence[TimedAction]) -> TimedAction | None:
    """The last W among the actions of its rank that come ahead of this one with no wait in between."""
    begins = one.start
    for s in reversed(row[: row.index(one)]):
        if s.end < begins or s.action.kind == "W":
            return s if s.end == begins else None
        begins = s.start
    return None


def _keeps(bound: Callable[..., int]) -> Rule:
    """A rule: no rank keeps more activations than the bound."""

    def rule(schedule: Schedule, sizes: Sizes) -> str | None:
        for rank, most in enumerate(peak_live(schedule)):
            enough = bound(rank, **sizes)
            if most > enough:
                first = "".join(a.kind for a in schedule.actions[rank]).index("B")
                why = f" (it does {first} forwards before its first backward)" if first > enough else ""
                return f"rank {rank} keeps {most} activations at a time; {_are(enough)} enough{why}"
        return None

    return rule


def _are(count: int) -> str:
    return "1 is" if count == 1 else f"{count} are"


def _forwards_first(schedule: Schedule, sizes: Sizes) -> str | None:
    for rank, row in enumerate(schedule.actions):
        kinds = "".join(a.kind for a in row)
        if "BF" in kinds:
            return f"rank {rank} goes back before its last forward; GPipe does all forwards first"
    return None


def _one_order(schedule: Schedule, sizes: Sizes) -> str | None:
    """A rule: all ranks take the forwards in the same order, and so the backwards."""
    for kind, what in (("F", "forwards"), ("B", "backwards")):
        orders = [[a.microbatch for a in row if a.kind == kind] for row in schedule.actions]
        other = next((rank for rank, order in enumerate(orders) if order != orders[0]), None)
        if other is not None:
            return f"rank 0 takes the {what} in another order than rank {other}; all ranks share one order"
    return None


def _all_split(schedule: Schedule, sizes: Sizes) -> str | None:
    for rank in range(schedule.p):
        for i in range(schedule.m):
            if not schedule.is_split(i, rank):
                return f"rank {rank} has a B{i} but no W{i}: every backward is to be split"
    return None


def _whole(schedule: Schedule, sizes: Sizes) -> str | None:
    return "it holds a W; here a backward is undivided" if schedule.splits else None


# ---------------------------------------------------------------------------------------------- sizes to ask for


_SHOWN = {"p": 2, "m": 4}
_FEW = [{"p": p, "m": m} for p in range(2, 7) for m in range(1, p)]
_MANY = [{"p": p, "m": m} for p in range(1, 6) for m in sorted({p, p + 1, 2 * p - 1, 2 * p, 3 * p})]


def _large(low: int, high: int) -> Callable[[Draw, str], dict[str, Any]]:
    """Draw sizes beyond the grids, with `low` p to `high` p microbatches."""

    def drawn(draw: Draw, function: str) -> dict[str, Any]:
        p = draw.integer(7, 10)
        return {"function": function, "sizes": [{"p": p, "m": draw.integer(max(1, low * p), max(1, high * p - 1))}]}

    return drawn


def _asked(function: str, sizes: Iterable[Sizes]) -> dict[str, Any]:
    return {"function": function, "sizes": list(sizes)}


def _case(
    function: str, what: str, sizes: list[Sizes], drawn: Callable[[Draw, str], dict[str, Any]], points: int = 1,
    accept: Iterable[Accept] = (), after: Sequence[Sizes] = (),
) -> Case:  # fmt: skip
    """A hidden case: the fixed sizes in one call, then drawn ones; the sizes of `after` come before both."""

    def some(draw: Draw) -> dict[str, Any]:
        return _asked(function, [*after, *drawn(draw, function)["sizes"]])

    return Case(what, some, points=points, hidden=True, fixed=[_asked(function, [*after, *sizes])],
                accept=list(accept))  # fmt: skip


# -------------------------------------------------------------------------------------------------------- GPipe


def _gpipe(schedule: Schedule, sizes: Sizes) -> str | None:
    rules = _whole, _forwards_first, _one_order, _no_longer(lambda p, m: 3 * (m + p - 1))
    return next(filter(None, (rule(schedule, sizes) for rule in rules)), None)


_GPIPE_SHOWN = {"p": 2, "m": 3}

GPIPE = Exercise(
    "gpipe",
    drive=_drive,
    without=GENERATORS,
    cases=[
        Case("2 ranks, 3 microbatches", _asked("gpipe", [_GPIPE_SHOWN]), accept=[_runs(_gpipe)]),
        _case("gpipe", "fewer microbatches than ranks", _FEW, _large(0, 1), after=[_GPIPE_SHOWN],
              accept=[_runs(_gpipe, after=[_GPIPE_SHOWN])]),
        _case("gpipe", "as many as ranks, or more", _MANY, _large(1, 3), points=2, after=[_GPIPE_SHOWN],
              accept=[_runs(_gpipe, after=[_GPIPE_SHOWN])]),
    ],
    idea="Look at the picture of two ranks and two microbatches: which words differ from rank to rank?",
    hint="Every rank has the same list: F of all m microbatches, then B of all m, in an order that all ranks share.",
)  # fmt: skip

# --------------------------------------------------------------------------------------------------------- 1F1B

_MEMORY = _keeps(lambda rank, p, m: min(m, p - rank))
_TIME = _no_longer(lambda p, m: 3 * (m + p - 1))

ONE_F_ONE_B = Exercise(
    "one_f_one_b",
    drive=_drive,
    without=GENERATORS,
    cases=[
        Case("2 ranks, 4 microbatches: it runs", _asked("one_f_one_b", [_SHOWN]), accept=[_runs(_whole)]),
        _case("one_f_one_b", "as many microbatches as ranks, or more: it runs", _MANY, _large(1, 3), after=[_SHOWN],
              accept=[_runs(_whole, after=[_SHOWN])]),
        _case("one_f_one_b", "fewer: it runs", _FEW, _large(0, 1), after=_MANY,
              accept=[_runs(_whole, after=_MANY)]),
        _case("one_f_one_b", "it takes no longer than GPipe", _FEW + _MANY, _large(1, 3),
              accept=[_judged(_TIME, runs=_whole)]),
        _case("one_f_one_b", "rank r keeps at most p - r activations", _FEW + _MANY, _large(1, 3), points=2,
              accept=[_judged(_MEMORY, runs=_whole, before=_TIME)]),
    ],
    idea="How many forwards can rank r do before the gradient of its first microbatch can be back at it?",
    hint="Rank r does min(m, p-r-1) forwards to warm up. Then a forward and a backward in turn while forwards are "
    "left, then the backwards that remain.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- interleaved


_ONE_GROUP = [{"p": p, "m": p, "v": v} for p in (2, 3, 4, 5) for v in (2, 3, 4)]
_GROUPS = [
    {"p": p, "m": p * n, "v": v} for p, n, v in ((2, 2, 2), (2, 5, 3), (3, 2, 2), (3, 3, 4), (4, 2, 3), (5, 2, 2))
]
_INTERLEAVED_SHOWN = {"p": 2, "m": 4, "v": 2}
_SOME = [*_ONE_GROUP[::3], *_GROUPS]


def _many_groups(draw: Draw, function: str) -> dict[str, Any]:
    p = draw.integer(5, 7)
    return _asked(function, [{"p": p, "m": p * draw.integer(2, 5), "v": draw.integer(2, 5)}])


def _one_group(draw: Draw, function: str) -> dict[str, Any]:
    p = draw.integer(5, 8)
    return _asked(function, [{"p": p, "m": p, "v": draw.integer(2, 5)}])


def _warm_up(rank: int, p: int, v: int) -> int:
    return 2 * (p - rank - 1) + (v - 1) * p


def _as_asked(p: int, m: int, v: int) -> Schedule:
    """The lists as the exercise's text describes them."""
    table = [(i, c) for first in range(0, m, p) for c in range(v) for i in range(first, first + p)]
    rows = []
    for rank in range(p):
        ahead = min(m * v, _warm_up(rank, p, v))
        steps = [[("F", k), ("B", k - ahead)] for k in range(m * v + ahead)]
        places = [(kind, *table[k]) for step in steps for kind, k in step if 0 <= k < m * v]
        rows.append(tuple(Action(kind, i, c if kind == "F" else v - 1 - c) for kind, i, c in places))
    return Schedule("asked", tuple(rows), round_robin(p, v))


def _hides_messages(schedule: Schedule, sizes: Sizes) -> str | None:
    """A rule: the lists are as fast as the described ones when a message takes a tenth, or half, of a chunk's
    forward."""
    for part in (Fraction(1, 10), Fraction(1, 2)):
        costs = Costs(latency=part / schedule.v).divided(schedule.v)
        takes, within = (simulate(one, costs).makespan for one in (schedule, _as_asked(**sizes)))
        if takes > within:
            return (
                f"when messages take time ({float(part):g} of a chunk's forward) it takes {float(takes):.5g} steps; "
                f"{float(within):.5g} are enough with the warm-up described, which has the distance twice"
            )
    return None


_FASTER = _no_longer(lambda p, m, v: 3 * m + Fraction(3 * (p - 1), v))
_WARM = _keeps(lambda rank, p, m, v: min(m * v, _warm_up(rank, p, v) + 1))

INTERLEAVED = Exercise(
    "interleaved",
    drive=_drive,
    without=GENERATORS,
    cases=[
        Case("2 ranks, 4 microbatches, 2 chunks: it runs", _asked("interleaved", [_INTERLEAVED_SHOWN]),
             accept=[_runs(_whole)]),
        _case("interleaved", "other sizes: it runs", _GROUPS, _many_groups, after=[_INTERLEAVED_SHOWN],
              accept=[_runs(_whole, after=[_INTERLEAVED_SHOWN])]),
        _case("interleaved", "as many microbatches as ranks: it runs", _ONE_GROUP, _one_group, after=_GROUPS,
              accept=[_runs(_whole, after=_GROUPS)]),
        _case("interleaved", "as fast as the lists described, with free and with slow messages", _SOME, _many_groups,
              points=2, accept=[_judged(_FASTER, _hides_messages, runs=_whole)]),
        _case("interleaved", "no rank keeps more activations than its warm-up + 1", _SOME, _many_groups,
              accept=[_judged(_WARM, runs=_whole, before=_FASTER)]),
    ],
    idea="All ranks read the same two rows of slots, in groups of p microbatches; only the warm-up differs.",
    hint="One table for all ranks: for each group of p microbatches, for each chunk, for each microbatch of the group. "
    "F(k) is table[k]; B(k) is the same microbatch with chunk v-1-c. Warm up with 2(p-r-1) + (v-1)p forwards, "
    "at most all of them, then F and B in turn.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------------- ZB-H1

_THIRD = _no_longer(lambda p, m: 3 * m + p - 1)
_AS_BEFORE = _keeps(lambda rank, p, m: min(m, p))


def _third_if_many(schedule: Schedule, sizes: Sizes) -> str | None:
    """A rule: a third of the bubble. With fewer microbatches than ranks the bubble is larger, whatever the list, and
    the rule does not apply."""
    return _THIRD(schedule, sizes) if sizes["m"] >= sizes["p"] else None


ZB_H1 = Exercise(
    "zb_h1",
    drive=_drive,
    without=GENERATORS,
    cases=[
        Case("2 ranks, 4 microbatches: it runs, every backward split", _asked("zb_h1", [_SHOWN]),
             accept=[_runs(_all_split)]),
        _case("zb_h1", "as many microbatches as ranks, or more: it runs", _MANY, _large(1, 3), after=[_SHOWN],
              accept=[_runs(_all_split, after=[_SHOWN])]),
        _case("zb_h1", "fewer microbatches than ranks: it runs", _FEW, _large(0, 1), after=_MANY,
              accept=[_runs(_all_split, after=_MANY)]),
        _case("zb_h1", "a third of 1F1B's bubble", _MANY, _large(1, 3), points=2,
              accept=[_judged(_THIRD, runs=_all_split)]),
        _case("zb_h1", "no rank keeps more than p activations", _FEW + _MANY, _large(1, 3),
              accept=[_judged(_AS_BEFORE, runs=_all_split, before=_third_if_many)]),
    ],
    idea="How many activations does rank r of your 1F1B keep, and how many more may it keep?",
    hint="Start from your 1F1B. It keeps p-r activations on rank r and may keep p, so r W may wait: after B of "
    "microbatch i do W of i - r, if there is one; what is left of W comes at the end.",
)  # fmt: skip

# --------------------------------------------------------------------------------------------------- beat ZB-H1

# W takes half as long as F and B; 4 ranks, 8 microbatches. ZB-H1 takes 24.5 steps and keeps 4 activations, and no list
# of one chunk a rank within 4 takes less: before its last F, rank 3 must have done 4 W, or it would keep more. So its
# last B ends at 3 + 16 + 2 at the earliest; 3 more B and a W end at 24.5. Interleaved lists with the short warm-up keep
# 4 as well and take 23.75 steps; 23 where each backward is divided and its W comes at once; 22.25 where rank r puts r W
# aside. With two chunks 21.5 is the least: rank 3 begins at 1.5 and works 20 steps.
_STEPS = 23


def _drive_beat(exercise: Any) -> Any:
    return exercise.beat_zb_h1()


def _theirs(lists: Any) -> Schedule:
    """The learner's lists as a schedule.

    Raises:
        ConfigError: they are no lists of actions for 4 ranks and 8 microbatches, or cannot run.
    """
    if not isinstance(lists, list | tuple) or len(lists) != 4:
        raise ConfigError("four lists are wanted, one a rank")
    rows = [_actions(row, rank) for rank, row in enumerate(lists)]
    found = {a.microbatch for row in rows for a in row}
    if found != set(range(8)):
        raise ConfigError(
            f"with m=8 the microbatches are 0 to 7; it has {', '.join(map(str, sorted(found))) or 'none'}"
        )
    schedule = placed("yours", [list(map(str, row)) for row in rows])
    if schedule.forward_only:
        raise ConfigError("no rank goes back: it holds no B")
    if schedule.v > 2:
        raise ConfigError(f"it has {schedule.v} chunks a rank; a rank has two layers, so at most two chunks")
    return schedule


def _beats(*rules: Callable[[Schedule], str | None]) -> Accept:
    def accept(answer: Answer) -> str | None:
        try:
            schedule = _theirs(answer.value)
        except ConfigError as error:
            return error.what if not rules else "not judged yet: see above"
        return next(filter(None, (rule(schedule) for rule in rules)), None)

    return accept


def _faster(schedule: Schedule) -> str | None:
    plan = simulate(schedule, half_w(schedule))
    if plan.makespan < _STEPS:
        return None
    return f"it takes {float(plan.makespan):g} steps; fewer than {_STEPS} are asked for{_in_the_way(plan)}"


def _within_four(schedule: Schedule) -> str | None:
    for rank, most in enumerate(peak_live(schedule)):
        if most > 4 * schedule.v:
            return f"rank {rank} keeps {most / schedule.v:g} activations at a time; 4 are allowed"
    return (
        _faster(schedule)
        and f"no points yet: no rank keeps more than 4, but with {_STEPS} steps or more it does not count"
    )


BEAT = Exercise(
    "beat_zb_h1",
    drive=_drive_beat,
    without=GENERATORS,
    cases=[
        Case("it runs: 4 ranks, 8 microbatches", {}, accept=[_beats()]),
        Case("fewer than 23 steps", {}, points=2, accept=[_beats(_faster)]),
        Case("and no rank keeps more than 4 activations", {}, points=2, accept=[_beats(_within_four)]),
    ],
    idea="With the short warm-up rank r of the interleaved lists keeps 8 - r chunks at most, and 8 are allowed. What "
    "did ZB-H1 do with such room?",
    hint="The interleaved lists with p-r-1 + p forwards to warm up, every backward divided: rank r may put r W aside, "
    "so the k-th W comes after the (k+r)-th B, and what is left at the end. That takes 22.25 steps. Or let a program "
    "write the lists. Keep a clock for each rank and the end of each action; again and again choose, of all actions "
    "whose inputs are there, the one that can begin first; of several a B before an F before a W, and a later chunk "
    "before an earlier one. Begin an F only while the rank keeps fewer than 8 chunks.",
)  # fmt: skip
