"""Conversion of tensors to messages and back for a process group, and errors in gloo's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import ReduceOp
from torch.utils._python_dispatch import _disable_current_modes

Tensor = torch.Tensor
_DTYPES = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64,
    torch.bool,
}  # fmt: skip
_REDUCE = {
    name: getattr(ReduceOp, name.upper()) for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
}


def as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def units_of(tensors: Sequence[Tensor]) -> list[list[Any]]:
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise RuntimeError("Invalid scalar type")
        if tensor.layout != torch.strided:
            raise RuntimeError("unsupported layout")
    return sizes_of(tensors)


def sizes_of(tensors: Sequence[Tensor]) -> list[list[Any]]:
    return [[str(tensor.dtype).removeprefix("torch."), tensor.numel()] for tensor in tensors]


def reduction_of(opts: Any, tensors: Sequence[Tensor]) -> str:
    op = getattr(opts, "reduceOp", opts)
    op = ReduceOp.SUM if op is None else op
    name = next((name for name, one in _REDUCE.items() if op == one), None)
    if name is None:
        raise RuntimeError("Cannot use ReduceOp.PREMUL_SUM with Gloo")
    floating = tensors[0].is_floating_point()
    if name in ("band", "bor", "bxor") and floating:
        raise RuntimeError(f"Cannot use ReduceOp.{name.upper()} with non-integral dtype")
    if name == "avg" and not floating:
        tensors[0].new_ones(1).div_(2)  # raises
    return name


def root_of(opts: Any, more: dict[str, Any]) -> int:
    return int(more.get("root", getattr(opts, "rootRank", opts)))


def as_it_lies(output: Tensor) -> Tensor:
    """The memory of an output, in its order: gloo's all-to-all writes there and ignores strides."""
    return output if output.is_contiguous() else output.detach().as_strided((output.numel(),), (1,))


def need_contiguous(tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise RuntimeError("input tensor has to be contiguous")


def joined(tensors: Sequence[Tensor]) -> Tensor:
    with _disable_current_modes():
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def copy_into(outputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    for output, tensor in zip(outputs, given, strict=False):  # one that gets nothing keeps what it has
        fill_with([output], tensor)


def fill_with(outputs: Sequence[Tensor], given: Tensor) -> None:
    """Cut flat numbers into outputs, one after the other; autograd does not see it, as with gloo."""
    for output, flat in zip(outputs, given.split([output.numel() for output in outputs]), strict=True):
        output.data.copy_(flat.view(output.shape))
