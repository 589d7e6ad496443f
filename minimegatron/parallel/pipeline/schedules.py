"""The schedules by name: GPipe, 1F1B, interleaved 1F1B, and ZB-H1, ZB-V and DualPipeV, which split the backward.

`p` ranks, `m` microbatches, `v` chunks a rank. Ranks idle while the pipeline fills and while it drains: the *bubble*.
With equal stages and F = B = W = 1 (a full backward takes 2), in units of the ideal time 3m:

| schedule       | bubble               | live activations of a chunk, rank r            | paper                |
|----------------|----------------------|------------------------------------------------|----------------------|
| `gpipe`        | (p-1)/m              | m                                              | 1811.06965           |
| `1f1b`         | (p-1)/m              | min(m, p-r)                                    | 2006.15704, 2104.04473 |
| `interleaved`  | (p-1)/(vm)           | min(vm, 2(p-r-1) + (v-1)N + 1) of 1/v size     | 2104.04473           |
| `zb_h1`        | (p-1)/(3m)           | min(m, p)                                      | 2401.10241           |
| `zb_v`         | (p-1)/(6m)           | at most 2p of 1/2 size                         | 2401.10241, 2405.15362 |
| `dualpipe_v`   | (p-1)/(6m)           | at most 2p + 1 of 1/2 size                     | 2412.19437           |

**1F1B** has the bubble of GPipe, but keeps the activations of at most p microbatches. (Messages take no time here. With
a latency L, 1F1B stalls for 2 L in every microbatch, GPipe only while it fills and drains.)

**Interleaving** shrinks the bubble and costs v times the messages and more memory. All ranks run through one table of
T = v*m slots: microbatches go in groups of N (default p), and a group passes chunk 0, then chunk 1, and so on. Forward
slot k is `table[k]`; backward slot k is the same microbatch with the chunks in reverse order. Rank r warms up with
2(p-r-1) + (v-1)N forwards, then alternates. The factor 2, where 1 would do, leaves time for one hop of latency in each
direction. A group smaller than p would leave the last rank without work between groups, so Megatron's rule is:
p <= N <= m, and m % N is 0 or at least p.

**Splitting the backward.** A backward computes the gradient of the stage's input (B), for which the previous stage
waits, and those of its weights (W), for which only the optimizer waits. Send B's result at once, and do W while the
rank would otherwise be idle. Let F, B and W be the times of all chunks of a rank for a microbatch. Each rank idles for

    1f1b          (p-1)(F + B + W)
    zb_h1         (p-1) max(F, B, F + B - W)
    zb_v          (p-1)/2 F  if F = B = W        rank r starts r/2 later and is never idle from then on
    dualpipe_v    (p-1)/2 F  if F = B = W

`zb_h1` is 1F1B in which rank r does each W r microbatches later: the last ranks, whose backwards come first, keep their
wgrads for the time when the first ranks still run backwards.

In a V (`zb_v`, `dualpipe_v`) rank r holds stages r and 2p-1-r, so the first rank also has the last stage: the loss of a
microbatch is computed where it entered, and its backward begins on rank 0 at once.

`dualpipe_v` is the half of DeepSeek-V3's DualPipe that needs no second copy of the weights. Its steady state is pairs
(F of one chunk, B of the other) in which the communication of the one hides behind the computation of the other. The
executors run a pair one after the other, so here it shows its order and its memory. Where a pair runs as one kernel, as
DeepSeek counts it, F's output is sent when the pair ends and the bubble is p-1 pairs: worth it where a pair takes less
than F + B, because messages are hidden.

A valid schedule without one of its microbatches is valid (every dependency is between actions of one microbatch). So a
V-shaped schedule for fewer microbatches than its warm-up needs is a larger one without some of them.

Qi et al. 2024 (arXiv 2405.15362) has ZB-V and other schedules by their memory.

In Megatron-LM: `core/pipeline_parallel/schedules.py` (`get_schedule_table`, `get_pp_rank_microbatches`, and the two
`forward_backward_pipelining_*`). It has no ZB-H1, ZB-V or DualPipeV.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from minimegatron.errors import ConfigError, did_you_mean
from minimegatron.parallel.pipeline.actions import (
    Action,
    Message,
    Placement,
    Schedule,
    round_robin,
    schedule_from_text,
    straight,
    v_shaped,
)

__all__ = [
    "SCHEDULES", "Action", "Message", "Placement", "Schedule", "alternate", "build_schedule", "dualpipe_v",
    "forward_only", "gpipe", "interleaved", "interleaved_table", "interleaved_warmup", "one_f_one_b", "round_robin",
    "schedule_from_text", "straight", "v_shaped", "zb_h1", "zb_v",
]  # fmt: skip

Slot = tuple[int, int]  # microbatch, chunk


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards; a rank keeps the activations of all m microbatches."""
    row = (*(Action("F", i) for i in range(m)), *(Action("B", i) for i in range(m)))
    return Schedule("gpipe", (row,) * p, straight(p))


def one_f_one_b(p: int, m: int) -> Schedule:
    """A rank runs a backward as soon as it can: p - r - 1 forwards to warm up, then forward and backward in turn."""
    table = [(i, 0) for i in range(m)]
    rows = [alternate(table, table, warmup=p - rank - 1) for rank in range(p)]
    return Schedule("1f1b", tuple(rows), straight(p))


def interleaved(p: int, m: int, v: int, microbatch_group_size_per_vp_stage: int | None = None) -> Schedule:
    """1F1B with v chunks a rank, in groups of N = `microbatch_group_size_per_vp_stage` microbatches (default p).

    Raises:
        ConfigError: the group size breaks Megatron's rule (see the module), or p = 1 with v > 1.
    """
    group = _legal_group(p, m, v, microbatch_group_size_per_vp_stage)
    forward = interleaved_table(m, v, group)
    backward = [(i, v - 1 - chunk) for i, chunk in forward]
    rows = [alternate(forward, backward, interleaved_warmup(p, rank, v, group)) for rank in range(p)]
    return Schedule("interleaved", tuple(rows), round_robin(p, v))


def forward_only(p: int, m: int, placement: Placement | None = None) -> Schedule:
    """Evaluation: every microbatch once through every stage, nothing kept. Default: stage r on rank r.

    Rank lists follow the placement: microbatches in groups of p, each group through one chunk after the other.
    """
    placement = placement or straight(p)
    slots = interleaved_table(m, len(placement[0]), p)
    return Schedule("forward_only", (tuple(Action("F", *slot) for slot in slots),) * p, placement)


def interleaved_table(m: int, v: int, group: int) -> list[Slot]:
    """(microbatch, chunk) of each of the v*m forward slots (Megatron's `get_schedule_table`)."""
    firsts = range(0, m, group)
    return [(i, chunk) for first in firsts for chunk in range(v) for i in range(first, min(m, first + group))]


def interleaved_warmup(p: int, rank: int, v: int, group: int) -> int:
    """Forwards before the first backward (Megatron's `get_pp_rank_microbatches`); the caller caps it at v*m."""
    return p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * group


def alternate(forward: Sequence[Slot], backward: Sequence[Slot], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forward))
    ahead, rest = forward[:warmup], forward[warmup:]
    pairs = [a for f, b in zip(rest, backward, strict=False) for a in (Action("F", *f), Action("B", *b))]
    left = backward[len(rest) :]
    return (*(Action("F", *f) for f in ahead), *pairs, *(Action("B", *b) for b in left))


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B whose rank r does every W r microbatches after its B."""
    rows = []
    for rank in range(p):
        warmup = min(m, p - rank - 1)
        row = [Action("F", i) for i in range(warmup)]
        for i in range(m):
            if warmup + i < m:
                row.append(Action("F", warmup + i))
            row.append(Action("B", i))
            if i >= rank:
                row.append(Action("W", i - rank))
        row += [Action("W", i) for i in range(max(0, m - rank), m)]
        rows.append(tuple(row))
    return Schedule("zb_h1", tuple(rows), straight(p))


class _Hand:
    """Writes a rank's list: `do("F1", "B1")` takes the next microbatch of that kind and chunk each time."""

    def __init__(self) -> None:
        self.row: list[Action] = []
        self.count: dict[str, int] = {}
        self.waiting: deque[Action] = deque()  # W of every B that was split, oldest first

    def do(self, *words: str) -> None:
        """Append actions: `F0` forward of chunk 0; `B0` full backward; `I0` backward without wgrad; `W0` its wgrad."""
        for word in words:
            kind, chunk = word[0], int(word[1])
            i = self.done(word)
            self.count[word] = i + 1
            if kind == "B":  # a full backward also counts as both halves
                self.count[f"I{chunk}"] = self.count[f"W{chunk}"] = self.count[word]
            if kind == "I":
                self.count[f"B{chunk}"] = self.count[word]
                self.waiting.append(Action("W", i, chunk))
            self.row.append(Action("B" if kind == "I" else kind, i, chunk))

    def done(self, word: str) -> int:
        return self.count.get(word, 0)

    def oldest_w(self) -> None:
        """The W that has waited longest, if there is one."""
        if self.waiting:
            self.row.append(self.waiting.popleft())


def zb_v(p: int, m: int) -> Schedule:
    """ZB-V for F = B = W: no idle time between a rank's first and last action, and the memory of 1F1B."""
    fewest = max(m, 2 * p - 1)  # what the warm-up of rank 0 asks for
    return _first_microbatches(Schedule("zb_v", tuple(_zb_v_row(p, fewest, r) for r in range(p)), v_shaped(p)), m)


def _zb_v_row(p: int, m: int, rank: int) -> tuple[Action, ...]:
    hand = _Hand()
    hand.do(*["F0"] * (2 * (p - rank) - 1))  # until the first microbatch comes back up the V
    hand.do(*["F1", "F0"] * rank)
    hand.do(*["F1", "I1", "W1"] * (p - rank))
    while hand.done("F1") < m:
        if hand.done("F0") < m:
            hand.do("F0")
        hand.do("I0", "W0", "F1", "I1", "W1")
    hand.do(*["I0", "I1"] * rank)  # going back first; their W fill the time until the last gradients arrive
    hand.do(*["I0", "W0"] * (p - rank))
    hand.do(*["W1"] * (m - hand.done("W1")))
    hand.do(*["W0"] * (m - hand.done("W0")))
    return tuple(hand.row)


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipeV: in the steady state every forward is paired with a backward of the other chunk."""
    fewest = max(m, 2 * p)
    rows = tuple(_dualpipe_v_row(p, fewest, r) for r in range(p))
    return _first_microbatches(Schedule("dualpipe_v", rows, v_shaped(p)), m)


def _dualpipe_v_row(p: int, m: int, rank: int) -> tuple[Action, ...]:
    """The eight steps of DeepSeek's description; `after` is how many ranks are between this one and the turn of
    the V."""
    after, hand = p - rank - 1, _Hand()
    hand.do(*["F0"] * (2 * after))
    hand.do(*["F0", "F1"] * (rank + 1))
    for _ in range(after):
        hand.do("I1")
        hand.oldest_w()
        hand.do("F1")
    hand.do(*["F0", "B1", "F1", "B0"] * (m - 2 * p + rank + 1))  # the steady state: two overlapped pairs
    hand.do(*["B1", "F1", "B0"] * after)
    backwards = ["B1", "B0"] * (rank + 1)
    split_from = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    hand.do(*backwards[:split_from], *(word.replace("B", "I") for word in backwards[split_from:]))
    for _ in range(after):
        hand.oldest_w()
        hand.do("I0")
    while hand.waiting:
        hand.oldest_w()
    return tuple(hand.row)


def _first_microbatches(schedule: Schedule, m: int) -> Schedule:
    """The schedule without microbatches m and above."""
    rows = tuple(tuple(a for a in row if a.microbatch < m) for row in schedule.actions)
    return Schedule(schedule.name, rows, schedule.placement)


# ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ScheduleKind:
    """How a schedule is generated, how many chunks a rank has (None: any), and its placement."""

    generate: Callable[..., Schedule]
    chunks: int | None
    place: Callable[[int, int], Placement]


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(gpipe, 1, round_robin),
    "1f1b": ScheduleKind(one_f_one_b, 1, round_robin),
    "interleaved": ScheduleKind(interleaved, None, round_robin),
    "zb_h1": ScheduleKind(zb_h1, 1, round_robin),
    "zb_v": ScheduleKind(zb_v, 2, lambda p, v: v_shaped(p)),
    "dualpipe_v": ScheduleKind(dualpipe_v, 2, lambda p, v: v_shaped(p)),
}


def build_schedule(name: str, p: int, m: int, v: int | None = None, **options: Any) -> Schedule:
    """The schedule of this name for p ranks, m microbatches and v chunks a rank.

    Args:
        v: None takes the schedule's own number (interleaved: 2).
        options: `microbatch_group_size_per_vp_stage` of `interleaved`.

    Raises:
        ConfigError: no such schedule or option, or the schedule cannot have these sizes (with the rule and a fix).
    """
    if name not in SCHEDULES:
        raise ConfigError(f"no schedule `{name}`", fix=_nearest(name, SCHEDULES))
    kind = SCHEDULES[name]
    if p < 1 or m < 1 or (v is not None and v < 1):
        raise ConfigError(
            f"`{name}` with {p} ranks, {m} microbatches, {v or 1} chunks", fix="give at least one of each"
        )
    known = {"microbatch_group_size_per_vp_stage"} if kind.chunks is None else set()
    for option in options:
        if option not in known:
            raise ConfigError(f"`{name}` has no option `{option}`", fix=_nearest(option, known))
    if kind.chunks is None:
        return kind.generate(p, m, v or 2, **options)
    if v not in (None, kind.chunks):
        fits = [n for n, e in SCHEDULES.items() if e.chunks in (None, v)]
        raise ConfigError(
            f"`{name}` has {kind.chunks} chunk{'s' * (kind.chunks > 1)} on every rank, not {v}",
            fix=f"take one of {', '.join(fits)}, or set the number of virtual stages to {kind.chunks}",
        )
    return kind.generate(p, m)


def _nearest(word: str, candidates: Iterable[str]) -> str:
    candidates = list(candidates)
    known = f"there are {', '.join(candidates)}" if candidates else "it has none"
    return did_you_mean(word.lower(), candidates) or known


def _legal_group(p: int, m: int, v: int, group: int | None) -> int:
    """The group size N that Megatron would accept, else its rule."""
    n = p if group is None else group
    if v == 1:
        return n
    if p == 1:
        raise ConfigError(
            f"{v} chunks on the only rank of a pipeline", fix="set pipeline_model_parallel_size > 1, or v=1"
        )
    where = f"p={p} m={m} v={v}"
    if not p <= n <= m:
        raise ConfigError(
            f"groups of {n} microbatches: interleaving needs p <= group <= m",
            where=where,
            fix=f"give at least {p} microbatches and a group of {p} to {m} of them"
            if m >= p
            else f"raise the number of microbatches from {m} to at least {p}, or use 1f1b",
        )
    if 0 < m % n < p:
        legal = [g for g in range(p, m + 1) if m % g == 0 or m % g >= p]
        raise ConfigError(
            f"{m} microbatches in groups of {n} leave a last group of {m % n}, fewer than the {p} ranks",
            where=where,
            fix=f"make the number of microbatches a multiple of {n} (e.g. {m - m % n} or {m - m % n + n}), "
            f"or set microbatch_group_size_per_vp_stage to one of {', '.join(map(str, legal))}",
        )
    return n
