"""Cross entropy over a cut vocabulary: the work of one rank. Kernels: `csrc/cross_entropy.cu`.

    statistics(logits, target, first, real)      (m, sum exp(z - m), target's z, sum z), each [n]
    gradient(logits, target, lse, dloss, ...)    dlogits [n, w]

Between the two, ranks combine their numbers (`layers/loss.py`, by a `CrossEntropyPart`). `cross_entropy` is the whole
for one rank.
"""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.errors import require
from minimegatron.kernels import checks
from minimegatron.kernels.launch import DTYPES, accumulator, run

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def statistics(logits: torch.Tensor, target: torch.Tensor, first: int, real: int) -> Four:
    """See `reference.cross_entropy_statistics`: logits [n, w], target [n] int64; words first .. first + real - 1."""
    return torch.ops.minimegatron.cross_entropy_statistics(logits, target, first, real)


def gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    dloss: torch.Tensor,
    first: int,
    real: int,
    hit: float = 1.0,
    spread: float = 0.0,
) -> torch.Tensor:
    """See `reference.cross_entropy_gradient`: lse and dloss [n] in fp32 (fp64)."""
    return torch.ops.minimegatron.cross_entropy_gradient(logits, target, lse, dloss, first, real, hit, spread)


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of every row: logits [n, v], target [n] -> [n] in fp32 (fp64)."""
    return torch.ops.minimegatron.cross_entropy(logits, target)[0]


class CrossEntropyPart:
    """See `ops.CrossEntropyPart`. Kept: the logits and one number a row."""

    def __init__(self, logits: torch.Tensor, target: torch.Tensor, first: int, real: int) -> None:
        self.logits, self.target = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
        self.largest, self.partition, self.picked, self.total = statistics(self.logits, self.target, first, real)

    def top(self) -> torch.Tensor:
        return self.largest.clone()

    def sums(self, top: torch.Tensor, spread: bool) -> list[torch.Tensor]:
        return [self.picked, self.partition * (self.largest - top).exp()] + ([self.total] if spread else [])

    def lse(self, top: torch.Tensor, partition: torch.Tensor) -> torch.Tensor:
        return top + partition.log()

    def kept(self, partition: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.logits, self.target, lse

    @staticmethod
    def gradient(
        kept: tuple[torch.Tensor, ...], dloss: torch.Tensor, first: int, real: int, hit: float, spread: float
    ) -> torch.Tensor:
        logits, target, lse = kept
        dz = gradient(logits, target, lse, dloss.reshape(-1).to(lse.dtype), first, real, hit, spread)
        return dz.view(*dloss.shape, -1)


def _check(logits: torch.Tensor, target: torch.Tensor, real: int) -> None:
    op = "cross_entropy"
    checks.float_tensor(op, "logits", logits)
    require(logits.dim() == 2, f"{op}: logits are {tuple(logits.shape)}", "give [rows, columns]")
    require(target.dtype == torch.int64, f"{op}: target is {target.dtype}", "give int64")
    checks.shape(op, target=(target, (logits.shape[0],)))
    require(0 <= real <= logits.shape[1], f"{op}: {real} of {logits.shape[1]} columns", "give at most all of them")


@torch.library.custom_op("minimegatron::cross_entropy_statistics", mutates_args=(), device_types=("cpu", "cuda"))
def _statistics(logits: torch.Tensor, target: torch.Tensor, first: int, real: int) -> Four:
    _check(logits, target, real)
    logits, target = logits.contiguous(), target.contiguous()
    out = _four(logits)
    if logits.shape[0]:
        run(
            "cross_entropy",
            "mm_cross_entropy_statistics",
            logits,
            logits,
            target,
            *out,
            *logits.shape,
            first,
            real,
            DTYPES[logits.dtype],
        )
    return out


@_statistics.register_fake
def _(logits: torch.Tensor, target: torch.Tensor, first: int, real: int) -> Four:
    _check(logits, target, real)
    return _four(logits)


def _four(logits: torch.Tensor) -> Four:
    m, total, picked, spread = (logits.new_empty(logits.shape[0], dtype=accumulator(logits.dtype)) for _ in range(4))
    return m, total, picked, spread


@torch.library.custom_op("minimegatron::cross_entropy_gradient", mutates_args=(), device_types=("cpu", "cuda"))
def _gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    dloss: torch.Tensor,
    first: int,
    real: int,
    hit: float,
    spread: float,
) -> torch.Tensor:
    _check(logits, target, real)
    n, wide = (logits.shape[0],), accumulator(logits.dtype)
    checks.shape("cross_entropy_gradient", lse=(lse, n), dloss=(dloss, n))
    require(lse.dtype == dloss.dtype == wide, f"lse is {lse.dtype}, dloss {dloss.dtype}", f"give both in {wide}")
    logits, target, lse, dloss = (t.contiguous() for t in (logits, target, lse, dloss))
    dz = torch.empty_like(logits)
    if dz.numel():
        args = (logits, target, lse, dloss, dz, *logits.shape, first, real, hit, spread, DTYPES[logits.dtype])
        run("cross_entropy", "mm_cross_entropy_gradient", logits, *args)
    return dz


@_gradient.register_fake
def _(
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    dloss: torch.Tensor,
    first: int,
    real: int,
    hit: float,
    spread: float,
) -> torch.Tensor:
    return checks.like(logits)


@torch.library.custom_op("minimegatron::cross_entropy", mutates_args=(), device_types=("cpu", "cuda"))
def _cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, lse)"""
    m, total, picked, _ = _statistics(logits, target, 0, logits.shape[-1])
    lse = m + total.log()
    return lse - picked, lse


@_cross_entropy.register_fake
def _(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _check(logits, target, logits.shape[-1])
    return _four(logits)[:2]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _grads(ctx: Any, dloss: torch.Tensor, _: Any) -> Any:
    logits, target, lse = ctx.saved_tensors
    return gradient(logits, target, lse, dloss, 0, logits.shape[1]), None


_cross_entropy.register_autograd(_grads, setup_context=_keep)
