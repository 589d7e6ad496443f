"""Prepacked weights: a second copy of a weight in oneDNN's own order, for products with few rows on a CPU.

The problem in a sentence: to multiply 32 rows by a matrix, a CPU spends half its time reordering the matrix, and
generation multiplies by the same matrices at every step.

`lay_out` gives weights a prepacked copy, which costs their memory once more. The copy is made anew at the next product
after its weight was written, which torch's version counter of the tensor shows. A write that goes around that tensor
(`weight.data`, a flat gradient buffer) moves no counter: call `lay_out` again after it.

GFLOP/s of one core (fp32, AVX-512) for [rows, 512] times [512, 2816], the weight in the cache:

| rows            | 4  | 8  | 16  | 32  | 128 |
|-----------------|----|----|-----|-----|-----|
| `F.linear`      | 40 | 52 | 69  | 79  | 77  |
| prepacked       | 85 | 81 | 104 | 109 | 104 |

With 24 M weights that come from memory, one layer after the other: 68 to 86 GFLOP/s for 16 to 64 rows, and 80 to 98
with them in huge pages (`huge_pages`). Up to three rows are multiplied by the weight as it is (`few_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from minimegatron.kernels import huge_pages, products

ROWS = 32  # rows that oneDNN packs for; the copy is faster for any number from 2 on


class LaidOut:
    """The prepacked copy of a weight, and the version of the weight that it was made of."""

    def __init__(self) -> None:
        self._copy: torch.Tensor | None = None
        self._of: tuple[int, int] | None = None

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The copy, made anew if the weight was written since."""
        version = weight.data_ptr(), weight._version
        if self._of != version:
            copy = self._copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
            huge_pages.collapse(torch.ops.mkldnn.data_ptr(copy), torch.ops.mkldnn._nbytes(copy))
            self._of = version
        assert self._copy is not None, "it was made above"
        return self._copy


def possible(weight: torch.Tensor) -> bool:
    """Whether oneDNN can prepack this weight: an fp32 matrix on a CPU."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.dim() == 2
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def lay_out(weights: Iterable[torch.Tensor]) -> int:
    """Let products with these weights use a prepacked copy, where `possible`.

    Returns:
        Bytes of the copies.
    """
    copied = 0
    for weight in weights:
        if possible(weight):
            weight.laid_out = LaidOut()  # type: ignore[attr-defined]
            huge_pages.collapse(weight.data_ptr(), weight.nbytes)
            copied += weight.nbytes
    return copied


def observed() -> bool:
    """Whether torch.compile or a dispatch mode sees the operators: then only torch's own are called."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`products.linear(x, weight, bias)`, by the prepacked copy where the weight has one."""
    laid_out: LaidOut | None = getattr(weight, "laid_out", None)
    one_row = x.numel() == x.shape[-1]
    if laid_out is None or one_row or observed() or x.dtype != weight.dtype:
        return products.linear(x, weight, bias)
    product = torch.ops.mkldnn._linear_pointwise.default  # the overload by name: torch need not look for it
    return product(x, laid_out.of(weight), bias, "none", [], "")  # type: ignore[no-any-return]
