"""Products of few rows with a weight that was laid out for them once.

The problem in a sentence: to multiply 32 rows by a matrix, a CPU spends half its time on bringing the matrix into the
order in which it is read, and in generation the same matrices are multiplied again and again.

oneDNN keeps a second copy of the weight in that order (`lay_out`). The copy belongs to one version of the weight: when
somebody has written into the weight, as an optimizer or a trainer that hands over new weights does, it is made anew at
the next product. Writes into the memory of a weight that go by another tensor (`weight.data`, a flat buffer) count no
version: after these, `lay_out` is called again. The copy costs the memory of the weight once more.

GFLOP/s of one core (fp32, AVX-512) for [rows, 512] times [512, 2816]:

| rows            | 4  | 8  | 16  | 32  | 128 |
|-----------------|----|----|-----|-----|-----|
| `F.linear`      | 40 | 52 | 69  | 79  | 77  |
| laid out        | 85 | 81 | 104 | 109 | 104 |

These have the weight in a cache. A model's weights are in memory: 24 M of them, one layer after the other, are
multiplied at 68 to 86 GFLOP/s for 16 to 64 rows, and in `huge_pages` at 80 to 98. Up to three rows are multiplied by
the weight as it is (`few_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from minimegatron.kernels import huge_pages

ROWS = 32  # what oneDNN is told to expect; it is faster with any number from 2 on


class LaidOut:
    """A weight's second copy, and which version of the weight it is of."""

    def __init__(self) -> None:
        self._copy: torch.Tensor | None = None
        self._of: tuple[int, int] | None = None

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The copy of this weight as it is now."""
        version = weight.data_ptr(), weight._version
        if self._of != version:
            copy = self._copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
            huge_pages.collapse(torch.ops.mkldnn.data_ptr(copy), torch.ops.mkldnn._nbytes(copy))
            self._of = version
        assert self._copy is not None, "it was made above"
        return self._copy


def possible(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies by this weight: a matrix of fp32 on a CPU."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.dim() == 2
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def lay_out(weights: Iterable[torch.Tensor]) -> int:
    """Have products with these weights use a second copy, where that is possible; returns its bytes."""
    copied = 0
    for weight in weights:
        if possible(weight):
            weight.laid_out = LaidOut()  # type: ignore[attr-defined]
            huge_pages.collapse(weight.data_ptr(), weight.nbytes)
            copied += weight.nbytes
    return copied


def observed() -> bool:
    """Whether somebody compiles, records or counts operators: then torch's own are called, which everybody knows."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear(x, weight, bias)` without a gradient, by the second copy where the weight has one."""
    laid_out: LaidOut | None = getattr(weight, "laid_out", None)
    one_row = x.numel() == x.shape[-1]
    if laid_out is None or one_row or observed() or x.dtype != weight.dtype:
        return F.linear(x, weight, bias)
    product = torch.ops.mkldnn._linear_pointwise.default  # the overload by name: torch need not look for it
    return product(x, laid_out.of(weight), bias, "none", [], "")  # type: ignore[no-any-return]
