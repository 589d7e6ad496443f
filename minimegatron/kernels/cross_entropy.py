"""Cross entropy over a cut vocabulary: the work of one rank. Kernels: `csrc/cross_entropy.cu`.

    statistics(logits, target, first, real)      (m, sum exp(z - m), target's z, sum z), each [n]
    gradient(logits, target, lse, dloss, ...)    dlogits [n, w]

Between the two, ranks combine their numbers (`layers/loss.py`, by a `CrossEntropyPart`). `cross_entropy` computes both
for one rank.
"""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.errors import require
from minimegatron.kernels.operators import DTYPES, accumulator, check_float, check_shape, like, operator, run

Tensor = torch.Tensor
Four = tuple[Tensor, Tensor, Tensor, Tensor]


class CrossEntropyPart:
    """See `interfaces.CrossEntropyPart`. Kept: the logits and one number a row."""

    native = False

    def __init__(self, logits: Tensor, target: Tensor, first: int, real: int) -> None:
        self.logits, self.target = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
        found = statistics(self.logits, self.target, first, real, self.native)
        self.largest, self.partition, self.picked, self.total = found

    def top(self) -> Tensor:
        return self.largest.clone()

    def sums(self, top: Tensor, spread: bool) -> list[Tensor]:
        return [self.picked, self.partition * (self.largest - top).exp()] + ([self.total] if spread else [])

    def lse(self, top: Tensor, partition: Tensor) -> Tensor:
        return top + partition.log()

    def kept(self, partition: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return self.logits, self.target, lse

    @classmethod
    def gradient(
        cls,
        kept: tuple[Tensor, ...],
        dloss: Tensor,
        first: int,
        real: int,
        hit: float,
        spread: float,
        over: bool = False,
    ) -> Tensor:
        logits, target, lse = kept
        args = logits, target, lse, dloss.reshape(-1).to(lse.dtype), first, real, hit, spread, cls.native
        if over and cls.native and logits.is_contiguous():
            overwrite(*args)
            dz = logits
        else:
            dz = gradient(*args)
        return dz.view(*dloss.shape, -1)


class NativeCrossEntropyPart(CrossEntropyPart):
    """By `csrc/cross_entropy.cpp`."""

    native = True


def cross_entropy(logits: Tensor, target: Tensor, native: bool = False) -> Tensor:
    """The loss of every row: logits [n, v], target [n] -> [n] in fp32 (fp64)."""
    return _cross_entropy(logits, target, native)[0]  # type: ignore[no-any-return]


def _statistics_outputs(logits: Tensor, target: Tensor, first: int, real: int, native: bool = False) -> Four:
    op = "cross_entropy"
    check_float(op, "logits", logits)
    require(logits.dim() == 2, f"{op}: logits are {tuple(logits.shape)}", "give [rows, columns]")
    require(target.dtype == torch.int64, f"{op}: target is {target.dtype}", "give int64")
    check_shape(op, target=(target, (logits.shape[0],)))
    require(0 <= real <= logits.shape[1], f"{op}: {real} of {logits.shape[1]} columns", "give at most all of them")
    m, total, picked, spread = (logits.new_empty(logits.shape[0], dtype=accumulator(logits.dtype)) for _ in range(4))
    return m, total, picked, spread


@operator("cross_entropy_statistics", _statistics_outputs)
def statistics(logits: Tensor, target: Tensor, first: int, real: int, native: bool = False) -> Four:
    """See `reference.cross_entropy_statistics`: logits [n, w], target [n] int64; words first .. first + real - 1."""
    out = _statistics_outputs(logits, target, first, real)
    if logits.shape[0]:
        args = (logits.contiguous(), target.contiguous(), *out, *logits.shape, first, real, DTYPES[logits.dtype])
        run("cross_entropy", "mm_cross_entropy_statistics", logits, *args, native=native)
    return out


def _gradient_output(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dloss: Tensor,
    first: int,
    real: int,
    hit: float = 1.0,
    spread: float = 0.0,
    native: bool = False,
) -> Tensor:
    _statistics_outputs(logits, target, first, real)
    n, wide = (logits.shape[0],), accumulator(logits.dtype)
    check_shape("cross_entropy_gradient", lse=(lse, n), dloss=(dloss, n))
    require(lse.dtype == dloss.dtype == wide, f"lse is {lse.dtype}, dloss {dloss.dtype}", f"give both in {wide}")
    return like(logits)


@operator("cross_entropy_gradient", _gradient_output)
def gradient(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dloss: Tensor,
    first: int,
    real: int,
    hit: float = 1.0,
    spread: float = 0.0,
    native: bool = False,
) -> Tensor:
    """See `reference.cross_entropy_gradient`: lse and dloss [n] in fp32 (fp64)."""
    dz = _gradient_output(logits, target, lse, dloss, first, real)
    _into(dz, logits.contiguous(), target, lse, dloss, first, real, hit, spread, native)
    return dz


@operator("cross_entropy_overwrite", lambda *_, **__: None, mutates=("logits",))
def overwrite(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dloss: Tensor,
    first: int,
    real: int,
    hit: float = 1.0,
    spread: float = 0.0,
    native: bool = False,
) -> None:
    """`gradient` in place of the logits, which are contiguous; by the kernel for CPUs."""
    _gradient_output(logits, target, lse, dloss, first, real)
    assert native and logits.is_contiguous(), "the kernel for CPUs overwrites dense logits"
    _into(logits, logits, target, lse, dloss, first, real, hit, spread, native)


def _into(
    dz: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dloss: Tensor,
    first: int,
    real: int,
    hit: float,
    spread: float,
    native: bool,
) -> None:
    target, lse, dloss = (t.contiguous() for t in (target, lse, dloss))
    if dz.numel():
        args = (logits, target, lse, dloss, dz, *logits.shape, first, real, hit, spread, DTYPES[logits.dtype])
        run("cross_entropy", "mm_cross_entropy_gradient", logits, *args, native=native)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    logits, target, ctx.native = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _grads(ctx: Any, dloss: Tensor, _: Any) -> Any:
    logits, target, lse = ctx.saved_tensors
    return gradient(logits, target, lse, dloss, 0, logits.shape[1], native=ctx.native), None, None


def _loss_outputs(logits: Tensor, target: Tensor, native: bool = False) -> tuple[Tensor, Tensor]:
    return _statistics_outputs(logits, target, 0, logits.shape[-1])[:2]


@operator("cross_entropy", _loss_outputs, keep=_keep, grads=_grads)
def _cross_entropy(logits: Tensor, target: Tensor, native: bool = False) -> tuple[Tensor, Tensor]:
    """(loss, lse)"""
    m, total, picked, _ = statistics(logits, target, 0, logits.shape[-1], native)
    lse = m + total.log()
    return lse - picked, lse
