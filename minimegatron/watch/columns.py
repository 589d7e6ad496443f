"""Numbers at iterations: appended while a run trains, and thinned for a drawing that has fewer pixels than steps.

The problem in a sentence: a curve of 100,000 steps is drawn on 500 pixels, and the one step at which the loss jumped is
what its reader looks for.

So a drawing gets *buckets*: of all points in `width` steps the smallest, the largest and a mean. Widths are powers of
two and buckets begin at their multiples, so while a run goes on only the last bucket changes: a page asks for what
begins at that bucket, and gets a few numbers a second.

The mean is smoothed over the last `smooth` steps, or over its bucket if that is longer. It is computed from all points,
so it does not depend on how far one has zoomed.

Memory: 12 bytes a number. A column that must shrink keeps of each four points the smallest and the largest (`thin`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np


class Column:
    """Numbers at ascending iterations. None stands for a number that is not finite."""

    def __init__(self) -> None:
        self._at, self._values = array("i"), array("d")

    def __len__(self) -> int:
        return len(self._at)

    @property
    def last_at(self) -> int:
        """The iteration of the last number; 0 without any."""
        return self._at[-1] if self._at else 0

    @property
    def points(self) -> dict[int, float]:
        """{iteration: number}, all of them."""
        return dict(zip(self._at, self._values, strict=True))

    @property
    def appends(self) -> tuple[Callable[[int], None], Callable[[float], None]]:
        """Two functions that together append a finite number at a later iteration, without looking."""
        return self._at.append, self._values.append

    def append(self, iteration: int, value: float | None) -> None:
        """Add a number; one at the same iteration is replaced."""
        if self._at and self._at[-1] >= iteration:
            self.cut(iteration)
        self._at.append(iteration)
        self._values.append(math.nan if value is None else value)

    def cut(self, iteration: int) -> None:
        """Forget what is at this iteration and after it."""
        kept = int(np.searchsorted(np.frombuffer(self._at, np.int32), iteration)) if self._at else 0
        del self._at[kept:]
        del self._values[kept:]

    def thin(self) -> None:
        """Keep half of the points: of each four in a row the smallest and the largest."""
        whole = len(self) // 4 * 4
        at, values = np.frombuffer(self._at, np.int32), np.frombuffer(self._values, np.float64)
        fours = np.nan_to_num(values[:whole].reshape(-1, 4), nan=np.inf)
        first, second = fours.argmin(1), np.where(np.isinf(fours), -np.inf, fours).argmax(1)
        second = np.where(first == second, (first + 1) % 4, second)  # four equal ones
        kept = np.sort(np.stack([first, second], 1), 1) + 4 * np.arange(len(fours))[:, None]
        kept = np.concatenate([kept.ravel(), np.arange(whole, len(self))])
        at, values = at[kept], values[kept]
        self._at[:], self._values[:] = array("i", at.tobytes()), array("d", values.tobytes())

    def buckets(self, first: int, end: int, width: int, smooth: int = 0) -> dict[str, list[Any]]:
        """The points of iterations [first, end) in buckets of `width` iterations.

        Returns:
            `at`, the last iteration of each bucket that has points; `low`, `high` and `mean` (None where no point is
            finite). Without `low` and `high` if no bucket has two points.
        """
        at, values = np.frombuffer(self._at, np.int32), np.frombuffer(self._values, np.float64)
        i, j = np.searchsorted(at, [first, end])
        if i == j:
            return {"at": [], "mean": []}
        of = at[i:j] // width
        begins = np.concatenate([[0], np.flatnonzero(np.diff(of)) + 1]) + i
        ends = np.concatenate([begins[1:], [j]])
        from_ = np.minimum(begins, np.searchsorted(at, at[ends - 1] - smooth, "right"))
        finite = np.isfinite(values[from_[0] : j])
        kept = np.where(finite, values[from_[0] : j], 0.0)
        pairs = np.stack([from_, ends], 1).ravel() - from_[0]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            mean = _sums(kept, pairs) / _sums(finite.astype(np.float64), pairs)
        found = {"at": at[ends - 1].tolist(), "mean": _numbers(mean)}
        if len(begins) < j - i:
            low = np.minimum.reduceat(np.nan_to_num(values[i:j], nan=np.inf, posinf=np.inf, neginf=np.inf), begins - i)
            high = np.maximum.reduceat(
                np.nan_to_num(values[i:j], nan=-np.inf, posinf=-np.inf, neginf=-np.inf), begins - i
            )
            found |= {"low": _numbers(low), "high": _numbers(high)}
        return found


def _sums(values: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Sums of the ranges [pairs[0], pairs[1]), [pairs[2], pairs[3]) ..."""
    sums: np.ndarray = np.add.reduceat(np.append(values, 0.0), pairs)[::2]
    return sums


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()]


def width_for(first: int, end: int, points: int) -> int:
    """The smallest power of two so that [first, end) has at most `points` buckets, or one more."""
    return 1 << max(0, math.ceil(math.log2(max(1, end - first) / points)))
