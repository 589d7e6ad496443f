"""FP8 matrix products from scratch: which scale, and what it costs in accuracy.

The problem in a sentence: an FP8 number has three or four significant binary digits and a range of 2^18 (E4M3) or 2^32
(E5M2), so a tensor must be multiplied by a scale that puts its largest element just below the top, and the scale must
be known before the product starts.

    y  = x W^T       x, W in E4M3
    dx = dy W        dy in E5M2 (HYBRID: gradients need range more than digits), W in E4M3
    dW = dy^T x      dy in E5M2, x in E4M3

| recipe    | scale of                          | from                                   | formats         |
|-----------|-----------------------------------|----------------------------------------|-----------------|
| `delayed` | a tensor                          | largest magnitudes of the last H steps | HYBRID          |
| `current` | a tensor                          | this tensor; one more pass over it     | HYBRID          |
| `block`   | 1 x 128 tiles, W 128 x 128 tiles  | each tile; a power of two              | E4M3 everywhere |
| `mx`      | 1 x 32 tiles                      | each tile; 2^(floor log2 amax - emax)  | E4M3 everywhere |

Tiles run along the index that a product sums over. x is summed over features in y and over tokens in dW, so tiled
recipes quantise it twice, each time from the original: the two copies are not each other's transpose. Tile scales are
local: a tile never crosses ranks.

A tensor's scale must be the same on every rank that holds a piece or a replica of it, or the ranks' models drift apart.
Delayed scaling has its own message for that, once a step, over tp x cp x dp::

    amax of each use          hist[0] = max(hist[0], amax)          no communication
    end of a step             hist[0] = max over ranks              one flat all-reduce, 4 bytes a tensor
                              a = max(hist);  scale = top / 2^margin / a    where a is finite and not 0
                              hist moves on by one; hist[0] = 0

Current scaling needs the largest magnitude of the whole tensor at once: an all-reduce of one number a use, over the
ranks that share it (tp). A second forward pass of a step (recompute) uses the same scale, and max is idempotent.

What a product loses: each factor is rounded by at most 2^-4 of itself (E4M3) or 2^-3 (E5M2) where it is not below the
format's smallest normal number. Beyond the top it is cut off: with delayed scaling when a tensor grows, with MX by up
to 1/8 of a tile's largest. Products are summed in fp32. Casts are saturating and round to nearest even, bit for bit
the same wherever they run. The product is that of the dequantised factors; with one scale a tensor, and sizes that its
tensor cores take, a GPU computes the same with `torch._scaled_mm`.

This file is about tensors: formats, scales, casts and a product. A linear layer is in `layers/fp8_linear.py`, a whole
model in `layers/fp8_model.py`.

Micikevicius et al. 2022 (arXiv 2209.05433); DeepSeek-V3 (arXiv 2412.19437) for blocks; Rouhani et al. 2023 (arXiv
2310.10537) for MX. Megatron-LM: `fp8_utils.py` and Transformer Engine's recipes.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Axis
from minimegatron.fields import require
from minimegatron.kernels import reference
from minimegatron.kernels.switch import kernels

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("delayed", "current", "block", "mx")


@dataclasses.dataclass(frozen=True)
class Fp8Recipe:
    """How scales are chosen.

    Attributes:
        kind: one of `RECIPES`.
        hybrid: gradients in E5M2; only for scales of a whole tensor.
        history: H, steps that delayed scaling remembers.
        algorithm: "max" of the history, or "most_recent".
        margin: leave this many powers of two below the top.
        kernels: `config.kernels`: what casts.
    """

    kind: str = "delayed"
    hybrid: bool = True
    history: int = 1024
    algorithm: str = "max"
    margin: int = 0
    kernels: str = "auto"

    def __post_init__(self) -> None:
        require(self.kind in RECIPES, f"fp8 recipe {self.kind!r}", f"choose among {', '.join(RECIPES)}")
        require(self.history >= 1, f"fp8 history of {self.history} steps", "at least 1")
        require(self.algorithm in ("max", "most_recent"), f"amax algorithm {self.algorithm!r}", "max or most_recent")

    def dtype(self, gradient: bool) -> torch.dtype:
        """The format of a gradient, or of an activation or a weight."""
        return E5M2 if gradient and self.hybrid and self.kind in ("delayed", "current") else E4M3


@dataclasses.dataclass(frozen=True)
class Quantised:
    """q [m, n] in FP8; x is about q times `inverse`: one number, or one for each tile."""

    q: torch.Tensor
    inverse: torch.Tensor
    tile: tuple[int, int] | None = None
    transposed: torch.Tensor | None = None  # q^T [n, m] in memory, where the cast has written it too

    def t(self) -> Quantised:
        """x^T, of a tensor with one scale; that of tiles must be quantised anew, along its other dim."""
        assert self.tile is None, "tiles run along one dim"
        return Quantised(self.q.t() if self.transposed is None else self.transposed, self.inverse, None, self.q)

    def dequantise(self) -> torch.Tensor:
        """[m, n] in fp32; exact, for q has few digits."""
        if self.tile is None:
            return self.q.float() * self.inverse
        return self.q.float() * reference.spread_tiles(self.inverse, self.tile, self.q.shape)


class DelayedScale(nn.Module):
    """Scale and history of one tensor; both are saved with the model, so a resumed run goes on with the same scales.

    Args:
        recipe: length of the history, algorithm, margin.
        dtype: format whose top the scale aims at.
    """

    amax_history: torch.Tensor
    scale: torch.Tensor

    def __init__(self, recipe: Fp8Recipe, dtype: torch.dtype) -> None:
        super().__init__()
        self.recipe, self.dtype = recipe, dtype
        # On the CPU also where a model is built on the meta device: these are values, not places for values.
        self.register_buffer("amax_history", torch.zeros(recipe.history, device="cpu"))
        self.register_buffer("scale", torch.ones((), device="cpu"))

    @torch.no_grad()
    def record(self, amax: torch.Tensor) -> None:
        """Note a magnitude of this step. A NaN counts as infinity, so that a maximum over ranks cannot lose it."""
        self.amax_history[0] = torch.maximum(self.amax_history[0], amax.nan_to_num(nan=torch.inf, posinf=torch.inf))

    @torch.no_grad()
    def update(self) -> None:
        """End of a step: the next scale, and the history moves on."""
        a = self.amax_history.amax() if self.recipe.algorithm == "max" else self.amax_history[0]
        self.scale.copy_(torch.where((a > 0) & a.isfinite(), scale_for(a, self.dtype, self.recipe.margin), self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1))
        self.amax_history[0] = 0.0
        # An overflow is not worth remembering: it would keep the scale where it is for as long as the history is.
        self.amax_history.masked_fill_(self.amax_history.isinf(), 0.0)


def scale_for(amax: torch.Tensor, dtype: torch.dtype, margin: int = 0) -> torch.Tensor:
    """top / 2^margin / amax, fp32 and finite; 1 where amax is 0 or not finite."""
    top = torch.full_like(amax, reference.FP8_TOP[dtype] / 2**margin, dtype=torch.float32)
    scale = (top / amax.float()).clamp(max=torch.finfo(torch.float32).max)  # one rounding; a number / tensor has two
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))


# ---------------------------------------------------------------------------------------------------- quantising


def cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, fused: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, n] -> (x times scale in FP8, amax of x)."""
    q, _, amax = _cast(x, scale, dtype, fused)
    return q, amax


def _cast(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, fused: str
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(q [m, n], its transposed copy [n, m] where a kernel writes it in the same pass, amax)."""
    ops = kernels(fused, "fp8", x)
    if ops is not None:
        return ops.cast(x, scale, dtype, True)  # type: ignore[no-any-return]
    return reference.fp8_cast(x, scale, dtype), None, reference.amax(x)


def quantise(
    x: torch.Tensor, recipe: Fp8Recipe, dtype: torch.dtype, state: DelayedScale | None, axis: Axis, square: bool = False
) -> Quantised:
    """x [m, n] in FP8 by a recipe, for a product that sums over n.

    Args:
        state: of delayed scaling: its scale is used, and in training it notes the magnitude.
        axis: ranks that share the tensor, for current scaling.
        square: block recipe: 128 x 128 tiles (a weight) instead of 1 x 128.
    """
    if recipe.kind in ("block", "mx"):
        tile = (1, 32) if recipe.kind == "mx" else (128, 128) if square else (1, 128)
        rule = "mx" if recipe.kind == "mx" else "power"
        ops = kernels(recipe.kernels, "fp8", x)
        q, inverse = (reference.fp8_cast_tiles if ops is None else ops.cast_tiles)(x, tile, dtype, rule)
        return Quantised(q, inverse, tile)
    if recipe.kind == "current":
        amax = all_reduce(reference.amax(x).nan_to_num(nan=torch.inf, posinf=torch.inf), axis, "max")
        scale = scale_for(amax, dtype, recipe.margin)
        q, transposed, _ = _cast(x, scale, dtype, recipe.kernels)
        return Quantised(q, 1 / scale, None, transposed)
    assert state is not None, "delayed scaling has a state for every tensor"
    scale = state.scale.clone()
    q, transposed, amax = _cast(x, scale, dtype, recipe.kernels)
    if state.training:
        state.record(amax)
    return Quantised(q, 1 / scale, None, transposed)


def product(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """a b^T, [m, k] x [n, k] -> [m, n], summed in fp32: the specification of an FP8 matrix product."""
    if _on_tensor_cores(a, b):
        return scaled_mm(a, b, dtype)
    return (a.dequantise() @ b.dequantise().t()).to(dtype)


def scaled_mm(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """The same by torch's own FP8 product; one scale a tensor, k and n multiples of 16."""
    assert a.tile is None and b.tile is None, "one scale a tensor"
    return torch._scaled_mm(a.q.contiguous(), b.q.contiguous().t(), a.inverse, b.inverse, out_dtype=dtype)


def _on_tensor_cores(a: Quantised, b: Quantised) -> bool:
    if a.tile is not None or b.tile is not None or not a.q.is_cuda:
        return False
    able = torch.cuda.get_device_capability(a.q.device) >= (8, 9)
    return able and a.q.shape[1] % 16 == 0 and b.q.shape[0] % 16 == 0 and a.q.numel() > 0
