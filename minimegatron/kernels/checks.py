"""What an operator asks of its tensors before anything is launched."""

from __future__ import annotations

import torch

from minimegatron.errors import require
from minimegatron.kernels.launch import DTYPES


def float_tensor(op: str, name: str, x: torch.Tensor) -> None:
    """`x` has a dtype that kernels are compiled for."""
    known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
    require(x.dtype in DTYPES, f"{op}: {name} is {x.dtype}", f"cast it to one of {known}, or use the reference")


def same(op: str, x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """The others have the dtype and device of `x`."""
    for name, y in others.items():
        if y is not None:
            require(
                y.dtype == x.dtype and y.device == x.device,
                f"{op}: {name} is {y.dtype} on {y.device}, the input {x.dtype} on {x.device}",
                "cast and move it yourself: kernels convert nothing in silence",
            )


def shape(op: str, **wanted: tuple[torch.Tensor | None, tuple[int, ...]]) -> None:
    """Each tensor has the shape beside it."""
    for name, (x, expected) in wanted.items():
        if x is not None:
            require(
                tuple(x.shape) == tuple(expected),
                f"{op}: {name} is {tuple(x.shape)}, expected {tuple(expected)}",
                "see the operator's docstring for the shapes",
            )


def parts_for(rows: int, device: torch.device, resident: int = 2) -> int:
    """How many blocks share the rows of a reduction over rows: `resident` a multiprocessor, four where emulated."""
    if device.type != "cuda":
        return max(1, min(rows, 4))
    return max(1, min(rows, resident * torch.cuda.get_device_properties(device).multi_processor_count))


def like(x: torch.Tensor) -> torch.Tensor:
    """An empty, contiguous tensor of the shape and dtype of `x`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
