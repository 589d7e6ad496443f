"""Turning silence into an error: mismatched collectives, one rank that failed alone.

The problem in a sentence: when ranks disagree, nothing tells you. Two all-reduces of the same shape in swapped order
return wrong numbers; float32 against int32 returns numbers; and a rank that raises leaves the others waiting. (How
copies of a weight that drift apart are found is in `comm/replicas`.)

*Fingerprints.* Before each collective every rank hashes what it is about to do: name, dtype, shape, axis, and the how-
manieth call on that axis. The ranks then compare 16 bytes with one MAX all-reduce of the pair `(h, ~h)`: since
`~h = -h - 1`, the result is `(max h, ~min h)`, and max = min means that all agree. Without the name, two swapped
all-reduces of one shape would pass. It costs about 1.3 ms a collective on two gloo ranks: on in tests and labs, off in
benchmarks.

| what                      | sent per call                  | axis                     |
|---------------------------|--------------------------------|--------------------------|
| `before` (fingerprints on)| 16 bytes                       | the collective's own     |
| `on_all_ranks`, `on_rank_zero` | the pickled outcomes      | the caller's             |

Megatron-LM has no such comparison.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from minimegatron.comm import outstanding
from minimegatron.errors import RankError

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Axis

T = TypeVar("T")


@dataclasses.dataclass
class _State:
    """What this process knows about its collectives. Module state, because a backward may run on autograd's thread,
    where a context variable would be lost; there is one per process, as there is one rank per process."""

    last: tuple[str, Axis] | None = None
    enabled: bool = False
    calls: dict[tuple[str, tuple[int, ...]], int] = dataclasses.field(default_factory=dict)


_state = _State()


def enable_fingerprints(on: bool = True) -> None:
    """Compare every collective of the package with what the other ranks call, from now on. All ranks must call it
    at the same place, because the counts of calls start at zero here."""
    _state.enabled = on
    _state.calls.clear()


@contextlib.contextmanager
def fingerprints(on: bool = True) -> Iterator[None]:
    """`enable_fingerprints` for a block."""
    before_block = _state.enabled
    enable_fingerprints(on)
    try:
        yield
    finally:
        enable_fingerprints(before_block)


def last_collective() -> tuple[str, Axis] | None:
    """The collective this rank issued last, for the message of a deadline."""
    return _state.last


def note(op: str, axis: Axis) -> None:
    """Called by `comm.p2p` before it waits for a message: remembers it, for the message of a deadline."""
    _state.last = (op, axis)


def before(op: str, x: torch.Tensor, axis: Axis, extra: str = "", *, comparable: bool = True) -> None:
    """Called by `comm.collectives` before each collective: remembers it, and compares it when fingerprints are on.

    Args:
        op: name of the collective.
        x: the tensor whose dtype and shape must agree.
        axis: who takes part.
        extra: whatever else must agree (the reduction, the source).
        comparable: False where the shapes may differ by design (uneven all-to-all): then only the rest is compared.

    Raises:
        RankError: the ranks are about to do different things; the message says what each of them meant to do.
    """
    _state.last = (op, axis)
    if not _state.enabled or axis.size == 1:
        return
    key = (axis.name, axis.ranks)
    number = _state.calls[key] = _state.calls.get(key, 0) + 1
    shape = str(tuple(x.shape)) if comparable else "uneven"
    mine = " ".join(filter(None, (op, str(x.dtype).removeprefix("torch."), shape, extra)))
    compare(f"{mine} on {axis.name}", axis, x.device, f"collective {number} of {axis.name}")


def gather_objects(item: T, axis: Axis) -> list[T]:
    """What every rank of `axis` passes, by rank; it must be picklable, and small."""
    items: list[T] = [item] * axis.size
    if axis.size > 1:
        with outstanding.blocking("all_gather_object", axis):
            dist.all_gather_object(items, item, group=axis.group)
    return items


def on_all_ranks(fn: Callable[[], T], axis: Axis) -> T:
    """Run `fn` on every rank of `axis`; when it raises on one, raise on all of them, together.

    Returns:
        What `fn` returned on this rank.

    Raises:
        RankError: on the ranks where `fn` went well while it failed elsewhere; names the rank and its error. The
            failing ranks raise their own error.
    """
    result, error = _outcome(fn)
    if axis.size > 1:
        texts: list[str | None] = [None] * axis.size
        with outstanding.blocking("all_gather_object", axis):
            dist.all_gather_object(texts, None if error is None else _text(error), group=axis.group)
        if error is None and (failed := [(r, t) for r, t in zip(axis.ranks, texts, strict=True) if t]):
            raise RankError(f"rank {failed[0][0]} failed: {failed[0][1]}", where=f"axis {axis.name}")
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
        with outstanding.blocking("broadcast_object_list", axis):
            dist.broadcast_object_list(box, src=axis.ranks[0], group=axis.group)
        result, text = box[0]
        if text is not None and error is None:
            raise RankError(f"rank {axis.ranks[0]} failed: {text}", where=f"axis {axis.name}")
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def is_consequence(error: BaseException | str) -> bool:
    """Whether an error (or its text) only says that talking to another rank failed: that rank knows the cause."""
    if isinstance(error, BaseException) and not isinstance(error, RuntimeError | ConnectionError):
        return False
    return bool(_LOST.search(str(error))) or timed_out(error)


def timed_out(error: BaseException | str) -> bool:
    """Whether the error says that another rank did not answer in time (rather than that its connection broke)."""
    return bool(_TIMED_OUT.search(str(error)))


def ranges(ranks: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` -> `"0-2, 5"`."""
    runs: list[list[int]] = []
    for r in sorted(ranks):
        if runs and r == runs[-1][1] + 1:
            runs[-1][1] = r
        else:
            runs.append([r, r])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# The words of gloo, NCCL and torch's stores. They are all plain RuntimeErrors.
_LOST = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|caused pair closure|remote process (exited|has)"
    r"|NCCL communicator was aborted|failed to recv, got 0 bytes|Could not connect to|TCPStore|recvValue failed"
)
_TIMED_OUT = re.compile(
    r"Timed out waiting|[Ww]ait timeout|Socket Timeout|timed out after \d+ *ms|collective operation timeout"
)


def _outcome(fn: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return fn(), None
    except Exception as error:  # not swallowed: every caller raises it after telling the others
        return None, error


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def signed(h: int) -> int:
    """The int64 with the same 64 bits."""
    return h - (1 << 64) if h >> 63 else h


def disagreement(hashes: torch.Tensor, axis: Axis) -> list[int]:
    """Positions at which the int64 vector differs between ranks: one MAX all-reduce of `(h, ~h)`."""
    both = torch.cat([hashes, ~hashes])
    with outstanding.blocking("a comparison", axis):
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=axis.group)
        largest, smallest = both[: len(hashes)], ~both[len(hashes) :]
        return torch.nonzero(largest != smallest).flatten().tolist()


def compare(mine: str, axis: Axis, device: torch.device, what: str) -> None:
    """Raise on all ranks of the axis unless all pass the same text."""
    if not disagreement(torch.tensor([signed(hash_of(mine))], device=device), axis):
        return
    everyone: list[str] = [""] * axis.size
    with outstanding.blocking("all_gather_object", axis):
        dist.all_gather_object(everyone, mine, group=axis.group)
    said: dict[str, list[int]] = {}
    for rank, text in zip(axis.ranks, everyone, strict=True):
        said.setdefault(text, []).append(rank)
    raise RankError(
        f"ranks disagree at {what}: "
        + "; ".join(f"rank{'s' * (len(r) > 1)} {ranges(r)}: {text}" for text, r in said.items()),
        where=f"axis {axis.name}, ranks {ranges(axis.ranks)}",
        fix="every rank of a group must make the same calls, in the same order, with the same shapes and dtypes",
    )
