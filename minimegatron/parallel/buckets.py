"""Gradients in one contiguous buffer, cut into buckets that can travel one by one.

The problem in a sentence: a model has hundreds of gradients; hundreds of small all-reduces pay hundreds of latencies,
and one all-reduce of everything cannot start before the last gradient is there.

So every gradient is a view (`param.main_grad`) into one flat fp32 buffer, and the buffer is cut into buckets of about
`bucket_size` elements. Parameters are laid out in *reverse* order of registration: the backward pass produces gradients
from the last layer to the first, so the first bucket is complete first and can travel while the rest is computed.

    forward order    embedding  layer 0  layer 1  output
    buffer           [output | layer 1 | layer 0 | embedding]
    buckets          [------ 0 ------][-------- 1 ----------]

fp32 for a reason: adding 1000 ones in bf16 stops at 256. Bytes: 4 per parameter on every rank.

Megatron-LM: `megatron/core/distributed/param_and_grad_buffer.py`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import Pending, all_reduce_start

DEFAULT_BUCKET_SIZE = 40_000_000


@dataclasses.dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a buffer."""

    start: int
    stop: int


def bucket_layout(numels: list[int], bucket_size: int | None) -> tuple[list[Span], list[tuple[Span, list[int]]]]:
    """Where each parameter lies, and which parameters share a bucket.

    Args:
        numels: sizes of the parameters in registration order.
        bucket_size: a bucket is closed when it holds at least this many elements; None means one bucket.

    Returns:
        The span of each parameter (registration order), and for each bucket its span and its parameters' indices.
    """
    spans: list[Span] = [Span(0, 0)] * len(numels)
    buckets: list[tuple[Span, list[int]]] = []
    start = offset = 0
    members: list[int] = []
    for index in reversed(range(len(numels))):
        spans[index] = Span(offset, offset + numels[index])
        offset += numels[index]
        members.append(index)
        if bucket_size is not None and offset - start >= bucket_size:
            buckets.append((Span(start, offset), members))
            start, members = offset, []
    if members:
        buckets.append((Span(start, offset), members))
    return spans, buckets


class Bucket:
    """A slice of the buffer that is reduced by one collective.

    Attributes:
        data: the slice.
        params: names of its parameters; the bucket may travel when each has its gradient.
    """

    def __init__(self, data: torch.Tensor, params: list[str]) -> None:
        self.data, self.params = data, params
        self.missing = set(params)
        self.pending: Pending | None = None

    def start(self, axis: Axis) -> None:
        """Begin the sum over the axis."""
        assert self.pending is None, "a bucket travels once a step"
        self.pending = all_reduce_start(self.data, axis)

    def finish(self) -> None:
        """Wait for the sum, and be ready for the next step."""
        assert self.pending is not None, "finish() before start()"
        self.pending.wait()
        self.pending, self.missing = None, set(self.params)


class GradBuffer:
    """The flat gradient buffer of a list of parameters; afterwards each has its view as `main_grad`.

    Args:
        params: (name, parameter) in registration order.
        bucket_size: elements of a bucket, None for one bucket.
        dtype: of the buffer.
    """

    def __init__(self, params: list[tuple[str, nn.Parameter]], bucket_size: int | None, dtype: torch.dtype) -> None:
        self.params = dict(params)
        spans, layout = bucket_layout([p.numel() for _, p in params], bucket_size)
        total = sum(p.numel() for _, p in params)
        device = params[0][1].device if params else torch.device("cpu")
        self.data = torch.zeros(total, dtype=dtype, device=device)
        for (_, param), span in zip(params, spans, strict=True):
            param.main_grad = self.data[span.start : span.stop].view(param.shape)  # type: ignore[attr-defined]
        self.buckets = [Bucket(self.data[s.start : s.stop], [params[i][0] for i in members]) for s, members in layout]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.params}
        self._next = 0  # buckets before this one have been started

    def ready(self, name: str, axis: Axis) -> None:
        """This parameter's gradient is complete; start every bucket that now may travel.

        Buckets start strictly in order: a parameter that gets no gradient on one rank only would otherwise make the
        ranks start them in different orders, and mismatched collectives return wrong numbers or hang.
        """
        self.bucket_of[name].missing.discard(name)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self.buckets[self._next].start(axis)
            self._next += 1

    def finish(self, axis: Axis) -> None:
        """Start what has not travelled yet, then wait for all."""
        for bucket in self.buckets[self._next :]:
            bucket.start(axis)
        for bucket in self.buckets:
            bucket.finish()
        self._next = 0
