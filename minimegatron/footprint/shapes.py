"""Shapes of results on torch's `meta` device without torch's compiler.

The problem in a sentence: torch computes most shapes on `meta` in Python, and the first of them imports sympy and
`torch._dynamo`, which takes a second of every training, since rank 0 counts the FLOPs of a step.

`ShapesAlone` gives the results of the operations that a dense layer consists of, contiguous and without values. Any
other operation is torch's own, as before.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

COMPARES = {"eq", "ne", "lt", "le", "gt", "ge"}
ALSO_OF_INTEGERS = {"add", "sub", "mul", "clone", "where", "masked_fill", "bitwise_and", "bitwise_or", "bitwise_not"}


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _pointwise(name: str, args: Sequence[Any]) -> torch.Tensor | None:
    """The result of an operation element by element; None if its dtype is not simply that of its arguments."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not tensors or any(isinstance(arg, list | tuple) for arg in args):
        return None
    found = [t.dtype for t in tensors if t.dim()] or [t.dtype for t in tensors]
    dtype = torch.bool if name in COMPARES else functools.reduce(torch.promote_types, found)
    simple = name in ALSO_OF_INTEGERS and not any(isinstance(arg, float) for arg in args)
    if not (dtype.is_floating_point or name in COMPARES or simple):
        return None
    sizes = itertools.zip_longest(*(reversed(t.shape) for t in tensors), fillvalue=1)  # from the last dim on
    return _meta([next((n for n in each if n != 1), 1) for each in sizes][::-1], dtype)


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return _meta(shape, functools.reduce(torch.promote_types, (t.dtype for t in tensors)))


def _stacked(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return _meta(shape, functools.reduce(torch.promote_types, (t.dtype for t in tensors)))


def _reduced(
    x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    if not x.is_floating_point():
        return None
    gone = {d % x.dim() for d in dim or range(x.dim())}
    shape = [1 if d in gone else n for d, n in enumerate(x.shape) if keepdim or d not in gone]
    return _meta(shape, dtype or x.dtype)


def _layer_norm(x: torch.Tensor, normalized: Sequence[int], *_: Any) -> tuple[torch.Tensor, ...]:
    rows = [*x.shape[: x.dim() - len(normalized)], *(1 for _ in normalized)]
    return _meta(x.shape, x.dtype), _meta(rows, x.dtype), _meta(rows, x.dtype)


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, _: Any, stride: Sequence[int], padding: Sequence[int], *more: Any
) -> torch.Tensor | None:
    if x.dim() != 3 or [*stride, *padding] != [1, 0]:
        return None
    return _meta([x.shape[0], weight.shape[0], x.shape[2] - weight.shape[2] + 1], x.dtype)


def _count(start: int, stop: int, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor | None:
    return _meta([stop - start], dtype or torch.int64) if isinstance(stop - start, int) else None


RULES: dict[str, Callable[..., Any]] = {
    "aten.mm.default": lambda a, b: _meta([a.shape[0], b.shape[1]], a.dtype),
    "aten.addmm.default": lambda c, a, b, **_: _meta([a.shape[0], b.shape[1]], a.dtype),
    "aten.bmm.default": lambda a, b: _meta([*a.shape[:2], b.shape[2]], a.dtype),
    "aten.convolution.default": _convolution,
    "aten.cumsum.default": lambda x, dim, **_: _meta(x.shape, x.dtype),
    "aten.softplus.default": lambda x, *_: _meta(x.shape, x.dtype),
    "aten.linalg_solve_triangular.default": lambda a, b, **_: _meta(b.shape, b.dtype),
    "aten.embedding.default": lambda table, ids, *_: _meta([*ids.shape, table.shape[1]], table.dtype),
    "aten.gather.default": lambda x, dim, index, **_: _meta(index.shape, x.dtype),
    "aten.cat.default": _joined,
    "aten.stack.default": _stacked,
    "aten.mean.dim": _reduced,
    "aten.sum.dim_IntList": _reduced,
    "aten.amax.default": _reduced,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.arange.start": _count,
    "aten.arange.default": lambda stop, **options: _count(0, stop, **options),
    "dry_run.attention.default": lambda q, k, v, *_: (
        _meta([*q.shape[:3], v.shape[-1]], q.dtype),
        _meta(q.shape[:3], torch.float32),
    ),
}


class ShapesAlone(TorchDispatchMode):
    """While it is open, tensors on `meta` get their shapes by these rules, where there is one."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Of torch: else the first operation imports `torch._dynamo`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, leaves = kwargs or {}, pytree.arg_tree_leaves(*args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        on_meta = all(t.is_meta or t.dim() == 0 for t in tensors) and (bool(tensors) or _is_meta(kwargs.get("device")))
        name, result = func._schema.name.removeprefix("aten::"), None
        if not on_meta:
            pass
        elif (rule := RULES.get(str(func))) is not None:
            result = rule(*args, **kwargs)
        elif torch.Tag.pointwise in func.tags and not func._schema.is_mutable:
            result = _pointwise(name, args)
        elif (
            torch.Tag.pointwise in func.tags
            and func._schema.arguments[0].alias_info is not None
            and "out" not in kwargs
        ):
            result = args[0]  # in place
        return func(*args, **kwargs) if result is None else result
