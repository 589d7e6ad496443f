"""Cross entropy over a vocabulary that no rank holds whole.

The problem in a sentence: logits of 8192 tokens x 128 k words are 4 GB in fp32, and each rank has computed only its
V/t columns of them. Gathering them would send `s b V` numbers; three all-reduces of `[s, b]` do the same:

    M    = max over ranks of max_j z_j              keeps exp() in range
    pred = sum over ranks of (z_target - M), zero on ranks that do not own the target
    S    = sum over ranks of sum_j exp(z_j - M)
    loss = log S - pred

    dz_j = softmax_j - [j is the target]            no communication at all

Columns that only pad the vocabulary are left out of M and S, so they take no probability and get no gradient, and the
loss does not depend on tp through the padding. (Megatron lets them take part; there the loss at the start of training
changes with tp.)

Label smoothing e spreads probability over all V words, so its mean runs over the *global* vocabulary (one more
all-reduce): loss = (1-e') nll - e' mean_V log p with e' = e V/(V-1). Megatron-Core 0.16.1 averages over the local V/t
columns, which is off by up to 0.04 for tp=2.

Saved for the backward pass: exp(z - M), 4 bytes * s * b * V/t, usually the largest single activation of a model.

Megatron-LM: `megatron/core/tensor_parallel/cross_entropy.py`.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from minimegatron.comm import collectives as c
from minimegatron.kernels.switch import kernels

if TYPE_CHECKING:
    from minimegatron.comm.axis import Axis


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    tp: Axis,
    *,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    fused: str = "torch",
) -> torch.Tensor:
    """The loss of every token.

    Args:
        logits: [..., V'/t], this rank's columns, any float dtype; computed in fp32 (fp64 stays fp64).
        target: [...] of global ids.
        tp: the axis that shares the vocabulary.
        vocab_size: V, logical columns; the rest is padding. Default all.
        label_smoothing: probability spread over the vocabulary.
        fused: `config.kernels`; kernels keep the logits for the backward pass instead of an fp32 softmax.

    Returns:
        [...] in fp32; inf where the target is no word. The caller decides about masks and means.
    """
    ops = kernels(fused, "cross_entropy", logits)
    if ops is not None:
        return _Fused.apply(logits, target, tp, vocab_size, label_smoothing, ops)  # type: ignore[no-any-return]
    apply = _VocabParallelCrossEntropy.apply
    return apply(logits, target, tp, vocab_size, label_smoothing)  # type: ignore[no-any-return]


def _loss(
    lse: torch.Tensor,
    picked: torch.Tensor,
    spread: list[torch.Tensor],
    target: torch.Tensor,
    total: int,
    smoothing: float,
) -> tuple[torch.Tensor, float]:
    """The loss, and e' of label smoothing, from what all ranks have added up.

    Args:
        lse: log of the sum of exp(z); like the others from any origin of z.
        picked: z of the target; a target that is padding or outside the vocabulary has none, and no probability.
        spread: [sum of z], where there is label smoothing.
    """
    loss = lse - picked.masked_fill((target < 0) | (target >= total), -torch.inf)
    if not smoothing:
        return loss, 0.0
    eps = smoothing * total / (total - 1)
    return (1 - eps) * loss - eps * (spread[0] / total - lse), eps


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, tp: Axis, vocab_size: int | None, smoothing: float
    ) -> torch.Tensor:
        width = logits.shape[-1]
        first, total = tp.rank * width, vocab_size or width * tp.size
        real = max(0, min(width, total - first))  # columns of this rank that are words
        wide = torch.promote_types(logits.dtype, torch.float32)
        top = logits[..., :real].amax(-1) if real else logits.new_full(logits.shape[:-1], -torch.inf)
        top = c.all_reduce(top.to(wide), tp, "max")

        own = (target >= first) & (target < first + width)
        column = (target - first).masked_fill(~own, 0)
        picked = (logits.gather(-1, column.unsqueeze(-1)).squeeze(-1) - top).masked_fill(~own, 0.0)
        z = logits - top.unsqueeze(-1)  # the one large tensor; what follows happens inside it
        spread = z[..., :real].sum(-1) if smoothing else None
        weights = z.exp_()
        weights[..., real:].zero_()
        sums = [picked, weights.sum(-1)] + ([spread] if spread is not None else [])
        picked, partition, *rest = c.all_reduce(torch.stack(sums), tp).unbind(0)
        loss, eps = _loss(partition.log(), picked, rest, target, total, smoothing)
        ctx.save_for_backward(weights, partition, own, column)
        ctx.eps, ctx.total, ctx.real, ctx.dtype = eps, total, real, logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        weights, partition, own, column = ctx.saved_tensors
        scale = (grads[0] / partition).unsqueeze(-1)
        # The largest activation of a model need not exist twice, unless the graph is kept for a second backward pass.
        dz = weights * scale if torch._C._autograd._get_current_graph_task_keep_graph() else weights.mul_(scale)
        if ctx.eps:
            dz[..., : ctx.real] -= grads[0].unsqueeze(-1) * (ctx.eps / ctx.total)
        hit = own * grads[0] * (1 - ctx.eps)
        dz.scatter_add_(-1, column.unsqueeze(-1), -hit.unsqueeze(-1))
        return dz.to(ctx.dtype), None, None, None, None


class _Fused(torch.autograd.Function):
    """The same by two kernels (`kernels/csrc/cross_entropy.cu`): before the collectives and in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        tp: Axis,
        vocab_size: int | None,
        smoothing: float,
        ops: ModuleType,
    ) -> torch.Tensor:
        width = logits.shape[-1]
        first, total = tp.rank * width, vocab_size or width * tp.size
        real = max(0, min(width, total - first))
        z, flat = logits.reshape(-1, width), target.reshape(-1)
        top, partition, picked, spread = ops.statistics(z, flat, first, real)
        highest = c.all_reduce(top.clone(), tp, "max")
        sums = [picked, partition * (top - highest).exp()] + ([spread] if smoothing else [])
        picked, partition, *rest = c.all_reduce(torch.stack(sums), tp).unbind(0)
        lse = highest + partition.log()
        loss, eps = _loss(lse, picked, rest, flat, total, smoothing)
        ctx.save_for_backward(z, flat, lse)
        ctx.place, ctx.eps, ctx.total, ctx.ops = (first, real), eps, total, ops
        return loss.view(target.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        z, flat, lse = ctx.saved_tensors
        dloss = grads[0].reshape(-1).to(lse.dtype)
        dz = ctx.ops.gradient(z, flat, lse, dloss, *ctx.place, 1 - ctx.eps, ctx.eps / ctx.total)
        return dz.view(*grads[0].shape, -1), None, None, None, None, None
