"""The fused operations of `kernels/ops.py` by torch's own operations, in the dtype of their inputs.

They run on a CPU, and wherever no kernel is available. `reference.py` computes the same in fp32 whatever the dtype, for
comparisons; here torch rounds between two operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from minimegatron.kernels import reference

if TYPE_CHECKING:
    from minimegatron.kernels.optimizer import Tables

PIECE = 1 << 16  # elements of a gradient whose squares are added up together, 512 KiB in fp64

# ------------------------------------------------------------------------------------------ norms, activations, rope


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """LayerNorm, or RMSNorm without a bias; statistics in fp32."""
    if bias is not None:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(h), h) of h = x + residual, which may be wider than the weight."""
    h = x + residual
    return norm(h.to(weight.dtype), weight, bias, eps), h


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def geglu(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate) * up


def geglu_tanh(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, GELU in its tanh form."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def quick_geglu(x: torch.Tensor, offset: float = 0.0, limit: float | None = None) -> torch.Tensor:
    """gate sigmoid(1.702 gate) (up + offset), gates at most `limit` and |up| at most `limit`."""
    gate, up = x.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + offset)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2."""
    return F.relu(x).square()


def bias_gelu(product: Callable[..., torch.Tensor], bias: torch.Tensor, approximate: bool) -> torch.Tensor:
    """See `ops.bias_gelu`; the product adds the bias."""
    return F.gelu(product(), approximate="tanh" if approximate else "none")


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """See `ops.rope`; angles are rounded to the dtype of x."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    rotated = 2 * cos.shape[-1]
    turn, keep = x[..., :rotated], x[..., rotated:]
    if interleaved:
        a, b = turn[..., 0::2], turn[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turn.chunk(2, -1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return out if keep.shape[-1] == 0 else torch.cat((out, keep), -1)


def heads(
    packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops.heads`; v is a view."""
    q, k, v = packed.split([packed.shape[3] - 2, 1, 1], 3)
    q, k = (rope(t, cos, sin, interleaved) for t in (q.flatten(2, 3), k.squeeze(3)))
    return q, k, v.squeeze(3)


# ---------------------------------------------------------------------------------------------------- cross entropy


class CrossEntropyPart:
    """See `interfaces.CrossEntropyPart`. Kept: exp(z - M) in fp32, 4 bytes a logit; the gradient overwrites it."""

    def __init__(self, logits: torch.Tensor, target: torch.Tensor, first: int, real: int) -> None:
        self.logits, self.target, self.first, self.real = logits, target, first, real

    def top(self) -> torch.Tensor:
        z, real = self.logits, self.real
        top = z[..., :real].amax(-1) if real else z.new_full(z.shape[:-1], -torch.inf)
        return top.to(torch.promote_types(z.dtype, torch.float32))

    def sums(self, top: torch.Tensor, spread: bool) -> list[torch.Tensor]:
        logits, target, first = self.logits, self.target, self.first
        self.own = (target >= first) & (target < first + logits.shape[-1])
        self.column = (target - first).masked_fill(~self.own, 0)
        picked = (logits.gather(-1, self.column.unsqueeze(-1)).squeeze(-1) - top).masked_fill(~self.own, 0.0)
        z = logits - top.unsqueeze(-1)  # the one large tensor; what follows happens inside it
        total = [z[..., : self.real].sum(-1)] if spread else []
        self.weights = z.exp_()
        self.weights[..., self.real :].zero_()
        return [picked, self.weights.sum(-1), *total]

    def lse(self, top: torch.Tensor, partition: torch.Tensor) -> torch.Tensor:
        return partition.log()  # of z - top, like the other sums

    def kept(self, partition: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.weights, partition, self.own, self.column

    @staticmethod
    def gradient(
        kept: tuple[torch.Tensor, ...],
        dloss: torch.Tensor,
        first: int,
        real: int,
        hit: float,
        spread: float,
        over: bool = False,
    ) -> torch.Tensor:
        weights, partition, own, column = kept
        scale = (dloss / partition).unsqueeze(-1)
        # The largest activation of a model need not exist twice, unless the graph is kept for a second backward pass.
        dz = weights * scale if torch._C._autograd._get_current_graph_task_keep_graph() else weights.mul_(scale)
        if spread:
            dz[..., :real] -= dloss.unsqueeze(-1) * spread
        taken = own * dloss * hit
        return dz.scatter_add_(-1, column.unsqueeze(-1), -taken.unsqueeze(-1))


# ---------------------------------------------------------------------------------------------------------- experts


class Permutation:
    """See `interfaces.Permutation`."""

    def __init__(self, tokens: torch.Tensor, wanted: torch.Tensor, row: torch.Tensor, most: int) -> None:
        self._tokens = tokens
        self._experts = wanted.shape[1]

    def permute(self, pairs: torch.Tensor) -> torch.Tensor:
        self._source = pairs // self._experts
        return self._tokens[self._source]

    def unpermute(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.new_zeros((len(self._tokens), rows.shape[1])).index_add(0, self._source, rows)


# -------------------------------------------------------------------------------------------------------------- fp8


def fp8_cast(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, seen: torch.Tensor | None
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """See `ops.fp8_cast`; without a transposed copy."""
    if seen is not None:
        torch.maximum(seen, reference.amax(x), out=seen)
    return reference.fp8_cast(x, scale, dtype), None, 1 / scale


def fp8_magnitudes(x: torch.Tensor) -> torch.Tensor:
    """See `ops.fp8_magnitudes`; one scalar."""
    return reference.amax(x).nan_to_num(nan=torch.inf, posinf=torch.inf)


def fp8_cast_by(
    x: torch.Tensor, amaxes: torch.Tensor, dtype: torch.dtype, margin: int
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """See `ops.fp8_cast_by`; without a transposed copy."""
    return fp8_cast(x, reference.scale_for(amaxes.amax(), dtype, margin), dtype, None)


def fp8_dequantise(q: torch.Tensor, scales: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """See `ops.fp8_dequantise`; by a table of scales as large as q."""
    return q.bfloat16().mul_(reference.spread_tiles(scales, tile, q.shape))


# -------------------------------------------------------------------------------------------------------- optimizer


def squared_norms(grads: Sequence[torch.Tensor], tables: Tables) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """See `ops.squared_norms`; in the order in which the gradients are given."""
    flat = [piece for g in grads for piece in g.reshape(-1).split(PIECE)]
    norms = torch.stack(torch._foreach_norm(flat, 2.0, dtype=torch.float64))
    return norms.square(), (~norms.isfinite()).double(), tuple(range(len(grads)))


def optimizer_step(
    inner: Any,
    mains: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor | None],
    factor: float,
    tables: Tables,
) -> None:
    """See `ops.optimizer_step`; by `inner.step()`, with scaled gradients, whose results are copied."""
    grads = [g.to(p.dtype) for p, g in zip(mains, grads, strict=True)]
    if grads and factor != 1.0:
        torch._foreach_mul_(grads, factor)
    for p, g in zip(mains, grads, strict=True):
        p.grad = g
    inner.step()
    tables.steps.clear()
    for p in mains:
        p.grad = None
    rounded = [c for c in copies if c is not None]
    if rounded:
        torch._foreach_copy_(rounded, [p for p, c in zip(mains, copies, strict=True) if c is not None])
