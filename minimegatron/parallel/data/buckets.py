"""The layout of a flat gradient buffer: the place of every parameter, buckets, and the shards of data-parallel ranks.

The problem in a sentence: a model has hundreds of gradients; hundreds of small messages pay hundreds of latencies, and
one message of everything cannot start before the last gradient is there.

So the gradients are in one buffer, cut into *buckets* of about `bucket_size` elements, one message each. Parameters are
laid out in reverse order of registration: the backward pass produces gradients from the last layer to the first, so the
first bucket is complete first and can be reduced while the rest is computed.

    forward order    embedding  layer 0  layer 1  output
    buffer           [output | layer 1 | layer 0 | embedding]
    buckets          [------ 0 ------][-------- 1 ----------]

**Shards.** A sharded optimizer gives each of D ranks the r-th of D equal parts of *every bucket*, wherever parameters
begin and end. A parameter may lie in several shards and a shard holds pieces of several parameters:

    bucket            [   b: 100 elements   |..| a: 10 |....]      S = 128 elements, D = 2
    rank 0's shard    [ b[0:64]   ]
    rank 1's shard                [ b[64:100] |..| a: 10 |..]

For the parts to be equal a bucket ends at a multiple of lcm(D, 128), and every parameter starts at a multiple of 64.
(The dots are padding: it is always 0, is sent, and counts in no norm.) A weight whose copies on two pipeline stages are
summed shard by shard has a bucket of its own, so that its shards are the same on both stages.

Rajbhandari et al. 2020 (arXiv 1910.02054). Megatron-LM: `_ParamAndGradBuffer` in
`megatron/core/distributed/param_and_grad_buffer.py`, `_build_model_gbuf_param_range_map` in
`megatron/core/optimizer/distrib_optimizer.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Sequence

DEFAULT_BUCKET_SIZE = 40_000_000
PARAM_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128  # elements: 256 bytes of fp32, 256 bytes of bf16


@dataclasses.dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a buffer."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def shifted(self, by: int) -> Span:
        return Span(self.start + by, self.stop + by)

    def overlap(self, other: Span) -> Span | None:
        """The elements in both spans; None if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


def gaps(spans: Iterable[Span], whole: Span) -> list[Span]:
    """The parts of `whole` outside of these spans, which do not overlap."""
    free, start = [], whole.start
    for span in [*sorted(spans, key=lambda span: span.start), Span(whole.stop, whole.stop)]:
        if start < span.start:
            free.append(Span(start, span.start))
        start = span.stop
    return free


@dataclasses.dataclass(frozen=True)
class BucketSpan:
    """One bucket.

    Attributes:
        span: its elements of the buffer, padding included.
        unpadded: elements up to the end of its last parameter.
        members: its parameters, by their index in the order of registration.
    """

    span: Span
    unpadded: int
    members: tuple[int, ...]

    def shard(self, rank: int, size: int) -> Span:
        """The part of the buffer that this one of `size` ranks owns."""
        share = self.span.size // size
        return Span(self.span.start + rank * share, self.span.start + (rank + 1) * share)


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of a parameter in one shard.

    Attributes:
        param: the parameter's index in the order of registration.
        bucket: number of its bucket.
        of_param: elements of the flattened parameter.
        of_buffer: elements of the buffer.
        of_shard: elements of the bucket's shard.
    """

    param: int
    bucket: int
    of_param: Span
    of_buffer: Span
    of_shard: Span


@dataclasses.dataclass(frozen=True)
class BufferLayout:
    """The places of parameters, buckets and shards in a buffer.

    Attributes:
        params: the span of each parameter, in the order of registration.
        buckets: in the order in which they become complete.
        shards: number of ranks that own a shard each; None if nothing is sharded or padded.
    """

    params: tuple[Span, ...]
    buckets: tuple[BucketSpan, ...]
    shards: int | None = None

    @property
    def total(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].span.stop if self.buckets else 0

    def pieces(self, rank: int) -> list[Piece]:
        """The pieces of parameters that a rank owns, bucket by bucket in the buffer's order."""
        assert self.shards is not None, "this buffer is not cut into shards"
        pieces = []
        for number, bucket in enumerate(self.buckets):
            shard = bucket.shard(rank, self.shards)
            for index in bucket.members:
                place = self.params[index]
                if both := place.overlap(shard):
                    pieces.append(Piece(index, number, both.shifted(-place.start), both, both.shifted(-shard.start)))
        return pieces


def bucket_layout(
    numels: Sequence[int],
    bucket_size: int | None,
    shards: int | None = None,
    groups: Sequence[Hashable] | None = None,
) -> BufferLayout:
    """Lay parameters out in reverse order of registration.

    Args:
        numels: sizes of the parameters in the order of registration.
        bucket_size: a bucket is closed when it holds at least this many elements; None means one bucket.
        shards: number of ranks over which every bucket is sharded; None shards and pads nothing.
        groups: a key for each parameter; parameters with different keys share no bucket.
    """
    spans = [Span(0, 0)] * len(numels)
    buckets: list[BucketSpan] = []
    start = offset = 0
    members: list[int] = []

    def close() -> None:
        nonlocal start, offset, members
        if members:
            end = offset if shards is None else _align(offset, math.lcm(shards, BUCKET_ALIGNMENT))
            buckets.append(BucketSpan(Span(start, end), offset - start, tuple(members)))
            start, offset, members = end, end, []

    for index in reversed(range(len(numels))):
        if members and groups is not None and groups[index] != groups[members[-1]]:
            close()
        if shards is not None:
            offset = _align(offset, PARAM_ALIGNMENT)
        spans[index] = Span(offset, offset + numels[index])
        offset += numels[index]
        members.append(index)
        if bucket_size is not None and offset - start >= bucket_size:
            close()
    close()
    return BufferLayout(tuple(spans), tuple(buckets), shards)


def _align(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit
