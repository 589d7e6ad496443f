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

from typing import TYPE_CHECKING, Any

import torch

from minimegatron.comm import collectives as c
from minimegatron.kernels import ops

if TYPE_CHECKING:
    from minimegatron.comm.axis import Axis


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    tp: Axis,
    *,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    kernels: str = "torch",
) -> torch.Tensor:
    """The loss of every token.

    Args:
        logits: [..., V'/t], this rank's columns, any float dtype; computed in fp32 (fp64 stays fp64).
        target: [...] of global ids.
        tp: the axis that shares the vocabulary.
        vocab_size: V, logical columns; the rest is padding. Default all.
        label_smoothing: probability spread over the vocabulary.
        kernels: `config.kernels`; kernels keep the logits for the backward pass instead of an fp32 softmax.

    Returns:
        [...] in fp32; inf where the target is outside of the vocabulary. The caller applies masks and means.
    """
    apply = _VocabParallelCrossEntropy.apply
    return apply(logits, target, tp, vocab_size, label_smoothing, kernels)  # type: ignore[no-any-return]


def _loss(
    lse: torch.Tensor,
    picked: torch.Tensor,
    spread: list[torch.Tensor],
    target: torch.Tensor,
    total: int,
    smoothing: float,
) -> tuple[torch.Tensor, float]:
    """The loss, and e' of label smoothing, from the sums over all ranks.

    Args:
        lse: log of the sum of exp(z); like the others up to a common shift of z.
        picked: z of the target; a target that is padding or outside the vocabulary has none, and no probability.
        spread: [sum of z] with label smoothing, else [].
    """
    loss = lse - picked.masked_fill((target < 0) | (target >= total), -torch.inf)
    if not smoothing:
        return loss, 0.0
    eps = smoothing * total / (total - 1)
    return (1 - eps) * loss - eps * (spread[0] / total - lse), eps


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        tp: Axis,
        vocab_size: int | None,
        smoothing: float,
        kernels: str,
    ) -> torch.Tensor:
        width = logits.shape[-1]
        first, total = tp.rank * width, vocab_size or width * tp.size
        real = max(0, min(width, total - first))  # columns of this rank that are words
        part = ops.cross_entropy(logits, target, first, real, kernels=kernels)
        top = c.all_reduce(part.top(), tp, "max")
        picked, partition, *rest = c.all_reduce(torch.stack(part.sums(top, bool(smoothing))), tp).unbind(0)
        lse = part.lse(top, partition)
        loss, eps = _loss(lse, picked, rest, part.target, total, smoothing)
        ctx.save_for_backward(*part.kept(partition, lse))
        ctx.gradient, ctx.numbers, ctx.dtype = type(part).gradient, (first, real, 1 - eps, eps / total), logits.dtype
        return loss.view(target.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dz = ctx.gradient(ctx.saved_tensors, grads[0], *ctx.numbers)
        return dz.to(ctx.dtype), None, None, None, None, None


def vocab_parallel_entropy(logits: torch.Tensor, tp: Axis, *, vocab_size: int | None = None) -> torch.Tensor:
    """The entropy of the distribution over the next token, H = log S - sum_j p_j z_j + M, with its gradient.

        dH/dz_j = -p_j (log p_j + H)

    Args:
        logits: [..., V'/t], this rank's columns; computed in fp32.
        tp, vocab_size: as in `vocab_parallel_cross_entropy`.

    Returns:
        [...] in fp32. Saved for the backward pass: the logits, and two numbers a token.
    """
    return _VocabParallelEntropy.apply(logits, tp, vocab_size)  # type: ignore[no-any-return]


class _VocabParallelEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tp: Axis, vocab_size: int | None) -> torch.Tensor:
        width = logits.shape[-1]
        real = max(0, min(width, (vocab_size or width * tp.size) - tp.rank * width))
        z = logits[..., :real].to(torch.promote_types(logits.dtype, torch.float32))
        top = z.amax(-1) if real else z.new_full(z.shape[:-1], -torch.inf)
        top = c.all_reduce(top, tp, "max")
        z = z - top[..., None]
        partition, weighted = c.all_reduce(torch.stack([z.exp().sum(-1), (z.exp() * z).sum(-1)]), tp).unbind(0)
        entropy = partition.log() - weighted / partition
        ctx.save_for_backward(logits, top + partition.log(), entropy)
        ctx.real = real
        return entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        logits, lse, entropy = ctx.saved_tensors
        log_p = logits[..., : ctx.real].to(lse.dtype) - lse[..., None]
        dz = torch.zeros_like(logits)
        dz[..., : ctx.real] = -grads[0][..., None] * log_p.exp() * (log_p + entropy[..., None])
        return dz, None, None
