"""Products of FP8 matrices, as Hopper's tensor cores take their factors.

Each factor lies in memory so that the numbers of one sum are neighbours: a [m, k] and b [n, k], both with whole rows.
(PTX ISA, `wgmma`: a factor of 8 bits is K-major; only 16 bits may be transposed on the way.)
"""

from __future__ import annotations

import torch

from labkit.tools import note
from minimegatron.errors import ConfigError

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [m, k], b [n, k], FP8 -> a b^T [m, n], summed and returned in float32.

    Raises:
        ConfigError: a factor is not FP8, or its rows do not lie in memory whole; the sums have different lengths.
    """
    for name, factor in (("a", a), ("b", b)):
        if factor.dtype not in FORMATS or factor.dim() != 2:
            shown = f"{str(factor.dtype).removeprefix('torch.')} {list(factor.shape)}"
            raise ConfigError(
                f"{name} is {shown}, and no matrix in FP8",
                where="product", fix="a matrix of float8_e4m3fn or float8_e5m2",
            )  # fmt: skip
        if not factor.is_contiguous():
            raise ConfigError(
                f"{name} {list(factor.shape)} has strides {factor.stride()}: the numbers of a sum are no neighbours",
                where="product", fix="copy it: t.contiguous() has whole rows, t.T.contiguous() is transposed",
            )  # fmt: skip
    if a.shape[1] != b.shape[1]:
        raise ConfigError(f"sums of {a.shape[1]} and {b.shape[1]} numbers", where="product", fix="a [m, k], b [n, k]")
    note("product", [str(a.dtype), str(b.dtype), *a.shape, len(b)])
    return a.float() @ b.float().T
