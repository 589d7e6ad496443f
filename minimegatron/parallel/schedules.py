"""The classical schedules, generated: GPipe, 1F1B and interleaved 1F1B.

`p` ranks, `m` microbatches, and every rank waits for its neighbours at the start and the end of a batch: the *bubble*.
"""

from __future__ import annotations

from minimegatron.errors import ConfigError
from minimegatron.parallel.actions import Action, Message, Placement, Schedule, straight

__all__ = ["Action", "Message", "Placement", "Schedule", "gpipe", "one_f_one_b"]


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards; a rank keeps the activations of all m microbatches."""
    _positive(p, m)
    row = (*_row("F", range(m)), *_row("B", range(m)))
    return Schedule("gpipe", (row,) * p, straight(p))


def one_f_one_b(p: int, m: int) -> Schedule:
    """As soon as a rank can go back it does: p - r - 1 forwards to warm up, then forward and backward in turn."""
    _positive(p, m)
    rows = []
    for rank in range(p):
        warmup = min(m, p - rank - 1)
        steady = [a for i in range(m - warmup) for a in (Action("F", warmup + i), Action("B", i))]
        rows.append((*_row("F", range(warmup)), *steady, *_row("B", range(m - warmup, m))))
    return Schedule("1f1b", tuple(rows), straight(p))


def _row(kind: str, microbatches: range) -> tuple[Action, ...]:
    return tuple(Action(kind, i) for i in microbatches)


def _positive(p: int, m: int) -> None:
    if p < 1 or m < 1:
        raise ConfigError(f"a pipeline of {p} ranks and {m} microbatches", fix="give at least one of each")
