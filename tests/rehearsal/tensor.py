"""A tensor that says it is on `cuda:N` and holds its numbers in CPU memory (`inner`).

Every operator on one goes through `dispatch.run`; so does, while `Everywhere` is active, every operator at all, because
`torch.zeros(3, device="cuda")` and `x.to("cuda")` have no such tensor among their arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rehearsal.capture import host_waits


class CudaTensor(torch.Tensor):
    """Wraps `inner`, a CPU tensor, on the device of this index. Views share its memory."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int, requires_grad: bool = False) -> CudaTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device("cuda", index),
            requires_grad=requires_grad,
        )
        self.inner = inner
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from tests.rehearsal import dispatch

        return dispatch.run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        host_waits("tolist")
        return self.inner.detach().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def record_stream(self, stream: Any) -> None:
        """The allocator is not simulated."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        host_waits("print")
        return f"{self.inner.detach()!r}".removesuffix(")") + f", device='{self.device}')"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy = self.detach().clone().requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, self.requires_grad)
            copy.__dict__.update({k: v for k, v in self.__dict__.items() if k != "inner"})
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        host_waits("pickle")
        return CudaTensor, (self.inner.detach(), self.device.index, self.requires_grad)


def unwrap(x: Any) -> Any:
    """The same nest of arguments with CPU tensors and no CUDA device."""
    if isinstance(x, CudaTensor):
        return x.inner
    if isinstance(x, torch.device) and x.type == "cuda":
        return torch.device("cpu")
    if isinstance(x, list | tuple):
        return type(x)(map(unwrap, x))
    return {name: unwrap(value) for name, value in x.items()} if isinstance(x, dict) else x


def wrap(x: Any, index: int, known: dict[int, CudaTensor] | None = None) -> Any:
    """The same nest of results on a GPU; a CPU tensor of `known` becomes the tensor that wraps it already."""
    if isinstance(x, torch.Tensor):
        same = known.get(id(x)) if known else None
        return same if same is not None else x if isinstance(x, CudaTensor) else CudaTensor(x, index)
    return type(x)(wrap(value, index, known) for value in x) if isinstance(x, list | tuple) else x


class Everywhere(TorchDispatchMode):
    """Sends every operator of this thread to `dispatch.run`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch need not import its compiler to leave us out."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from tests.rehearsal import dispatch

        return dispatch.run(func, args, kwargs or {})


def on_every_thread() -> None:
    """Activate `Everywhere` here and in each thread that Python starts from now on."""
    run: Callable[[threading.Thread], None] = threading.Thread.run

    def with_mode(self: threading.Thread) -> None:
        with Everywhere():
            run(self)

    threading.Thread.run = with_mode
    Everywhere().__enter__()


def assign_data() -> None:
    """Let `x.data = y` move x between the CPU and a GPU: so `module.to("cuda")` keeps its parameters.

    torch exchanges the memory and keeps the object; here the object changes its class as well.
    """
    plain = torch.Tensor.data

    def get(self: torch.Tensor) -> torch.Tensor:
        return self.detach() if isinstance(self, CudaTensor) else plain.__get__(self)

    def put(self: torch.Tensor, other: torch.Tensor) -> None:
        plain.__set__(self, other)
        if isinstance(other, CudaTensor):
            if not isinstance(self, CudaTensor):
                self._is_param = isinstance(self, torch.nn.Parameter)
                self.__class__ = CudaTensor
            self.inner = other.inner
        elif isinstance(self, CudaTensor):
            self.__class__ = torch.nn.Parameter if isinstance(self, torch.nn.Parameter) else torch.Tensor
            del self.inner

    torch.Tensor.data = property(get, put)
