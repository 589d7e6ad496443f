"""Matrix products of training on a CPU: by MKL, as torch multiplies in fp32, or by oneDNN, where that is faster.

The problem in a sentence: three quarters of a training step are products, and MKL is made by Intel for Intel.

GFLOP/s of one core (fp32, an AMD EPYC with AVX-512) of a microbatch of 512 rows:

| product                         | MKL: y, dgrad, wgrad | oneDNN: y, dgrad, wgrad |
|---------------------------------|----------------------|-------------------------|
| 256 -> 512                      | 100, 102, 94         | 108, 110, 99            |
| 256 -> 1536                     | 94, 97, 96           | 104, 109, 86            |
| 768 -> 256                      | 97, 102, 102         | 111, 108, 106           |
| 256 -> 8192                     | 85, 96, 91           | 99, 103, 83             |

So on these CPUs oneDNN computes y and dgrad, and MKL adds wgrad to its buffer in the same call. Elsewhere MKL computes
all three. What decides is the make of the CPU and no measurement: the same run has the same bits each time.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F


@functools.cache
def onednn_is_faster() -> bool:
    """Whether this is an AMD with AVX-512, and torch has both libraries."""
    try:
        about = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return False
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return both and "AuthenticAMD" in about and "avx512f" in about and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., i], weight [o, i] -> [..., o]; no gradient goes through it."""
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    product = torch.ops.mkldnn._linear_pointwise.default  # the overload by name: torch need not look for it
    return product(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def dgrad(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dy [..., o], weight [o, i] -> dy weight, [..., i]; no gradient goes through it."""
    return linear(dy, weight.t()) if _by_onednn(dy, weight) else dy @ weight


def _by_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    plain = type(x) is torch.Tensor and type(weight) in (torch.Tensor, torch.nn.Parameter)  # no fake tensor, no DTensor
    fits = x.dtype == weight.dtype == torch.float32 and x.is_cpu and weight.is_cpu and x.numel() > 0
    return plain and fits and not torch.compiler.is_compiling() and onednn_is_faster()
