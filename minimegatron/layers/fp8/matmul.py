"""FP8 matrix products from scratch: formats, scales, and their accuracy.

An FP8 number has three or four significant binary digits and a range of 2^18 (E4M3) or 2^32 (E5M2). So a tensor must be
multiplied by a scale that puts its largest element just below the format's largest number, and the scale must be known
before the product.

    y  = x W^T       x, W in E4M3
    dx = dy W        dy in E5M2 (HYBRID: gradients need range more than digits), W in E4M3
    dW = dy^T x      dy in E5M2, x in E4M3

| recipe    | scale of                          | from                                   | formats         |
|-----------|-----------------------------------|----------------------------------------|-----------------|
| `delayed` | a tensor                          | largest magnitudes of the last H steps | HYBRID          |
| `current` | a tensor                          | this tensor; one more pass over it     | HYBRID          |
| `block`   | 1 x 128 tiles, W 128 x 128 tiles  | each tile; a power of two              | E4M3 everywhere |
| `mx`      | 1 x 32 tiles                      | each tile; 2^(floor log2 amax - emax)  | E4M3 everywhere |

Tiles run along the index that a product sums over: x is summed over features in y and over tokens in dW, so tiled
recipes quantise it twice, each time from the original. A tile never crosses ranks.

A tensor's scale must be the same on every rank that holds a piece or a replica of it, or the ranks' models drift apart.
With delayed scaling ranks agree once a step over tp x cp x dp (`layers/fp8/scaling`). Current scaling all-reduces one
number a use, over the ranks that share the tensor (tp). A second forward pass of a step (recompute) uses the same
scale.

Each factor is rounded by at most 2^-4 of itself (E4M3) or 2^-3 (E5M2) where it is not below the format's smallest
normal number. Larger numbers saturate: with delayed scaling when a tensor grows, with MX by up to 1/8 of a tile's
largest. Casts round to nearest even, bit for bit the same wherever they run.

The product is that of the dequantised factors, summed in fp32:

| where                                   | multiplies                            | scales                        |
|-----------------------------------------|---------------------------------------|-------------------------------|
| a CPU                                   | fp32                                  | in the factors                |
| a GPU, one scale a tensor               | FP8 (`torch._scaled_mm`)              | after the sum                 |
| a GPU without FP8, one scale a tensor   | bf16, from q                          | after the sum, in fp32        |
| a GPU, tiles                            | bf16, from q times the scale          | in the factors: powers of two |

Every FP8 number is a bf16 number, and times a power of two it still is; so the last two multiply the same numbers on
tensor cores, at half of the rate of FP8 and some ten times that of fp32. Scales that are not powers of two
(`reference.tile_scales`' rule "float") would round a tile to 8 digits; no recipe has them. FP8 tensor cores sum over
multiples of 16; the rows of an expert, which dW sums over, are filled up with zeros.

FP8 tensor cores of an H100 keep about 14 binary digits of a partial sum (DeepSeek-V3, section 3.3.2) unless it is added
up in fp32 at intervals, which takes time. As in Transformer Engine, gradients do that and y does not
(`module/base.py`: `_2X_ACC_FPROP = False`, `_2X_ACC_DGRAD = _2X_ACC_WGRAD = True`).

Micikevicius et al. 2022 (arXiv 2209.05433); DeepSeek-V3 (arXiv 2412.19437) for blocks; Rouhani et al. 2023 (arXiv
2310.10537) for MX. Megatron-LM: `fp8_utils.py` and Transformer Engine's recipes.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.nn.functional as F

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_reduce
from minimegatron.errors import require
from minimegatron.kernels import ops, reference

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
        margin: leave this many powers of two below the largest number of the format.
        kernels: `config.kernels`, for the casts.
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
    """q [m, n] in FP8, with x close to q times `inverse`: one number, or one for each tile."""

    q: torch.Tensor
    inverse: torch.Tensor
    tile: tuple[int, int] | None = None
    transposed: torch.Tensor | None = None  # q^T [n, m] in memory, where the cast has written it too
    kernels: str = "auto"  # `config.kernels`: what dequantises tiles

    def t(self) -> Quantised:
        """x^T, for a tensor with one scale; a tensor with tiles must be quantised again, along its other dim."""
        assert self.tile is None, "tiles run along one dim"
        return Quantised(self.q.t() if self.transposed is None else self.transposed, self.inverse, None, self.q)

    def dequantise(self) -> torch.Tensor:
        """[m, n] in fp32; exact for tiles."""
        if self.tile is None:
            return self.q.float() * self.inverse
        return self.q.float() * reference.spread_tiles(self.inverse, self.tile, self.q.shape)

    def in_bf16(self) -> torch.Tensor:
        """[m, n]: with tiles what `dequantise` gives, else q without its scale.

        Exact: q has at most four binary digits, bf16 has eight and the exponents of fp32, and the scale of a tile is a
        power of two. Only if that is below 2^-124, in tiles of numbers below 1e-34, the smallest may be rounded.
        """
        if self.tile is None:
            return self.q.bfloat16()
        return ops.fp8_dequantise(self.q, self.inverse, self.tile, kernels=self.kernels)


# ------------------------------------------------------------------------------------------------------- casts


def cast(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, kernels: str, seen: torch.Tensor | None = None
) -> Quantised:
    """x [m, n] times `scale` in FP8.

    Args:
        kernels: `config.kernels`.
        seen: fp32 scalar that is raised to the amax of x; NaN if x has one.
    """
    q, transposed, inverse = ops.fp8_cast(x, scale, dtype, seen, kernels=kernels)
    return Quantised(q, inverse, None, transposed)


def cast_at_once(x: torch.Tensor, dtype: torch.dtype, margin: int, axis: Axis, kernels: str) -> Quantised:
    """x [m, n] in FP8, scaled by its own amax over the ranks of `axis`."""
    amaxes = ops.fp8_magnitudes(x, kernels=kernels)
    if axis.size > 1:
        amaxes = all_reduce(amaxes.amax(), axis, "max")
    q, transposed, inverse = ops.fp8_cast_by(x, amaxes, dtype, margin, kernels=kernels)
    return Quantised(q, inverse, None, transposed)


def cast_tiles(x: torch.Tensor, tile: tuple[int, int], dtype: torch.dtype, rule: str, kernels: str) -> Quantised:
    """x [m, n] with a power of two for every tile (rule "power" or "mx"), for a product that sums over n."""
    assert rule != "float", "products want powers of two: others are not exact in bf16"
    q, inverse = ops.fp8_cast_tiles(x, tile, dtype, rule, kernels=kernels)
    return Quantised(q, inverse, tile, kernels=kernels)


# ---------------------------------------------------------------------------------------------------- products


def product(a: Quantised, b: Quantised, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """a b^T, [m, k] x [n, k] -> [m, n], summed in fp32.

    On a CPU this is the specification; on a GPU tensor cores compute it, from FP8 where they take it, else from bf16.

    Args:
        fast: partial sums on FP8 tensor cores may keep fewer digits: for y, and not for gradients.
    """
    if not a.q.is_cuda:
        return (a.dequantise() @ b.dequantise().t()).to(dtype)
    if a.tile is None and b.tile is None and b.q.shape[0] % 16 == 0 and a.q.numel() and _takes_fp8(a.q.device):
        return scaled_mm(a, b, dtype, fast)
    return product_in_bf16(a, b, dtype)


def scaled_mm(a: Quantised, b: Quantised, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """`product` by torch's own FP8 product; one scale a tensor, n a multiple of 16."""
    assert a.tile is None and b.tile is None, "one scale a tensor"
    x, y = _filled(a.q), _filled(b.q).t()
    return torch._scaled_mm(x, y, a.inverse, b.inverse, out_dtype=dtype, use_fast_accum=fast)


def _filled(q: torch.Tensor) -> torch.Tensor:
    """q [m, k] with zeros added to k up to a multiple of 16; torch pads bytes, but not FP8."""
    short = -q.shape[1] % 16
    return F.pad(q.view(torch.uint8), (0, short)).view(q.dtype) if short else q.contiguous()


def product_in_bf16(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """`product` of factors in bf16, which are exact; scales of a whole tensor are multiplied in after the sum."""
    assert (a.tile is None) == (b.tile is None), "both factors have tiles, or neither"
    x, y = a.in_bf16(), b.in_bf16().t()
    if a.tile is not None and dtype == torch.bfloat16:
        return x @ y
    total = torch.mm(x, y, out_dtype=torch.float32)
    return (total if a.tile is not None else total * (a.inverse * b.inverse)).to(dtype)


@functools.cache
def _takes_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)
