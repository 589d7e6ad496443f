"""Small objects exchanged between ranks, and a failure of one rank raised on all of them.

The problem in a sentence: a rank that raises alone leaves the others waiting for it.

| call                 | sent                     | afterwards                                                      |
|----------------------|--------------------------|-----------------------------------------------------------------|
| `gather_objects`     | the pickled objects      | every rank has all of them                                      |
| `gather_to_first`    | the pickled objects      | the first rank has all of them                                  |
| `scatter_from_first` | the pickled objects      | every rank has its object of the first rank's list              |
| `on_all_ranks`       | the errors, if any       | `fn` succeeded on every rank, or every rank raises              |
| `on_rank_zero`       | the pickled outcome      | every rank has the first one's result, or raises its error      |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from minimegatron.comm.async_ops import blocking
from minimegatron.comm.axis import Axis
from minimegatron.errors import RankError

T = TypeVar("T")


def gather_objects(item: T, axis: Axis) -> list[T]:
    """The `item` of every rank of `axis`, in rank order; it must be picklable, and small."""
    items: list[T] = [item] * axis.size
    if axis.size > 1:
        with blocking("all_gather_object", axis):
            dist.all_gather_object(items, item, group=axis.group)
    return items


def gather_to_first(item: T, axis: Axis) -> list[T] | None:
    """The `item` of every rank of `axis`, in rank order, on the first one; None on the others."""
    items: list[T] | None = [item] * axis.size if axis.rank == 0 else None
    if axis.size > 1:
        with blocking("gather_object", axis):
            dist.gather_object(item, items, dst=axis.ranks[0], group=axis.group)
    return items


def scatter_from_first(items: Sequence[T], axis: Axis) -> T:
    """This rank's item of the first rank's list; the arguments of other ranks are ignored."""
    if axis.size == 1:
        return items[0]
    result: list[T] = [None]  # type: ignore[list-item]
    with blocking("scatter_object_list", axis):
        first = list(items) if axis.rank == 0 else None
        dist.scatter_object_list(result, first, src=axis.ranks[0], group=axis.group)
    return result[0]


def on_all_ranks(fn: Callable[[], T], axis: Axis) -> T:
    """Run `fn` on every rank of `axis`; when it raises on one, raise on all of them, together.

    Returns:
        What `fn` returned on this rank.

    Raises:
        RankError: on the ranks where `fn` succeeded while it failed elsewhere; names the rank and its error. The
            failing ranks raise their own error.
    """
    result, error = _outcome(fn)
    if axis.size > 1:
        texts = gather_objects(None if error is None else _text(error), axis)
        if error is None and (failed := [(r, t) for r, t in zip(axis.ranks, texts, strict=True) if t]):
            raise _told(*failed[0], axis)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def on_rank_zero(fn: Callable[[], T], axis: Axis) -> T:
    """Run `fn` on the first rank of `axis` only; every rank gets its result, or its error.

    Args:
        fn: its result must be picklable.

    Raises:
        RankError: on the other ranks, when `fn` raised on the first, which raises the original.
    """
    result, error = _outcome(fn) if axis.rank == 0 else (None, None)
    if axis.size > 1:
        box = [(result, None if error is None else _text(error))]
        with blocking("broadcast_object_list", axis):
            dist.broadcast_object_list(box, src=axis.ranks[0], group=axis.group)
        result, text = box[0]
        if text is not None and error is None:
            raise _told(axis.ranks[0], text, axis)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _outcome(fn: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return fn(), None
    except Exception as error:  # not swallowed: every caller raises it after telling the others
        return None, error


def _told(rank: int, text: str, axis: Axis) -> RankError:
    error = RankError(f"rank {rank} failed: {text}", where=f"axis {axis.name}")
    error.of_another = True
    return error


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
