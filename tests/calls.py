"""Every test's ranks call the same collectives: what each of them called is compared when its job is over.

gloo answers two different calls with numbers. `comm/fingerprints` compares each call before it is made, which is a
message more for each; here a rank notes its calls, and the notes come back with its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.ranks.pool import Results, WarmPool
from minimegatron.comm.async_ops import Observer, Work, add_observer, remove_observer

Calls = dict[tuple[str, tuple[int, ...]], list[str]]  # (name of an axis, its ranks) -> what was called there


class Notes(Observer):
    """What this rank calls over axes of several ranks."""

    def __init__(self) -> None:
        self.calls: Calls = {}

    def issue(self, work: Work) -> None:
        axis, x = work.axis, work.x
        if x is not None and axis.size > 1:
            shape = tuple(x.shape) if work.comparable else "uneven"
            said = f"{work.op} {x.dtype} {shape} {work.extra}"
            self.calls.setdefault((axis.name, axis.ranks), []).append(said)


def noted(rank: int, world: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Calls]:
    """On a rank: the result of `fn`, and its calls."""
    notes = Notes()
    add_observer(notes)
    try:
        return fn(rank, world, *args, **kwargs), notes.calls
    finally:
        remove_observer(notes)


class ComparedRanks:
    """Warm ranks that are a pool's, with `run` as it has."""

    def __init__(self, pool: WarmPool) -> None:
        self.pool = pool

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> Results:
        """`WarmPool.run`.

        Raises:
            AssertionError: two ranks called different things, or one of them more.
        """
        answers = self.pool.run(noted, fn, *args, timeout=timeout, **kwargs)
        for rank, (_, calls) in enumerate(answers):
            for (axis, ranks), made in calls.items():
                first = answers[ranks[0]][1].get((axis, ranks), [])
                at = next((i for i, pair in enumerate(zip(first, made, strict=False)) if pair[0] != pair[1]), None)
                if at is not None or len(first) != len(made):
                    one, other = (calls[at] if at is not None else f"{len(calls)} calls" for calls in (first, made))
                    raise AssertionError(f"call {at} over {axis}: rank {ranks[0]}: {one}; rank {rank}: {other}")
        results = Results(result for result, _ in answers)
        results.stdout = answers.stdout
        return results
