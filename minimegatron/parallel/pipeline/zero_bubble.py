"""Schedules that split the backward: ZB-H1, ZB-V and DualPipeV.

A backward computes two things: the gradient of its input (B), which the stage before is waiting for, and the gradient
of its weights (W), for which only the optimizer waits. Send B's result at once, and do W where the rank would
otherwise be idle. How much longer than the work of one rank a batch takes, if a rank (not a chunk) needs F, B and W
for a microbatch, and F = B = W = 1 in the last column:

| schedule     | excess                     |         | price                                                          |
|--------------|----------------------------|---------|----------------------------------------------------------------|
| 1F1B         | (p-1)(F + B + W)           | 3(p-1)  |                                                                |
| `zb_h1`      | (p-1) max(F, B, F + B - W) | p-1     | every rank keeps p activations, as rank 0 of 1F1B does         |
| `zb_v`       | (p-1)/2 F  if F = B = W    | (p-1)/2 | 2p half activations on every rank; rank r starts r/2 later and |
|              |                            |         | is never idle from then on                                     |
| `dualpipe_v` | (p-1)/2 F  if F = B = W    | (p-1)/2 | 2p + 1 half activations on every rank                          |

`zb_h1` is 1F1B in which rank r does each W r microbatches later: the last ranks, which can go back early, save their
weight gradients for the time when the first ranks are still busy going back.

In a V, rank r holds stages r and 2p-1-r, so the first rank also has the last stage: the loss of a microbatch is
computed where it entered, its backward can begin there at once, and rank 0 is the first with work again.

`dualpipe_v` is the half of DeepSeek-V3's DualPipe that needs no second copy of the weights. Its steady state is pairs
(F of one chunk, B of the other) in which the communication of the one hides behind the computation of the other. The
executor runs a pair one after the other, so here it shows its order and its memory. Where a pair runs as one unit, as
DeepSeek counts it, F's output leaves when both are done, and the excess is p-1: it pays where that unit is shorter than
F + B, because messages are hidden.

Dropping a whole microbatch from a valid schedule leaves it valid (every dependency is between actions of one
microbatch), which is how the V-shaped ones serve fewer microbatches than their warm-up wants.

Papers: Qi et al., Zero Bubble Pipeline Parallelism (2401.10241) and Pipeline Parallelism with Controllable Memory
(2405.15362); DeepSeek-V3 (2412.19437). Megatron-LM has none of them.
"""

from __future__ import annotations

from collections import deque

from minimegatron.parallel.pipeline.actions import Action, Schedule, straight, v_shaped


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
        """`F0` forward of chunk 0; `B0` full backward; `I0` backward for the input only; `W0` the weights' half."""
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
    wanted = max(m, 2 * p - 1)  # what the warm-up of rank 0 asks for
    return _first_microbatches(Schedule("zb_v", tuple(_zb_v_row(p, wanted, r) for r in range(p)), v_shaped(p)), m)


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
    wanted = max(m, 2 * p)
    rows = tuple(_dualpipe_v_row(p, wanted, r) for r in range(p))
    return _first_microbatches(Schedule("dualpipe_v", rows, v_shaped(p)), m)


def _dualpipe_v_row(p: int, m: int, rank: int) -> tuple[Action, ...]:
    """The eight steps of DeepSeek's description; `after` is how many ranks lie between this one and the V's turn."""
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
