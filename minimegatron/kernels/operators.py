"""Loads a library of kernels: calls its launchers, and makes torch operators of them.

    MM_EXPORT mm_norm_forward(const void* x, ..., int64_t rows, ..., int dtype, void* stream)

`Library` reads the C declaration, so that it is not written down twice: a pointer argument takes a tensor or None, the
last argument is the stream (emulated: None; of a kernel for CPUs: the number of threads). A kernel trusts its
arguments; the operator checks shapes before the launch (`check_*`).

An operator is a function that launches, and one that checks its arguments and returns empty outputs, which is also
used for fake tensors (`operator`). A call costs some ten microseconds on the host, a torch operator around it some
tens more: kernels are for tensors whose time is longer than that. A kernel for CPUs (`native`) is called without the
torch operator where nothing would see it: no dispatch mode, transform or compiler, and tensors of no other class.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from minimegatron.errors import MinimegatronError, require
from minimegatron.kernels import build

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
CPU_DTYPES = {torch.float32, torch.bfloat16, torch.float64}  # of kernels for CPUs
_KINDS = {"int64_t": ctypes.c_int64, "int": ctypes.c_int, "double": ctypes.c_double}
BAD_ARGUMENT = -1
CUDA_ERRORS = {  # cudaError_t -> what it means for a kernel that was built here, and the fix
    35: ("the driver is older than the compiler", "CUDA_HOME of a toolkit as old as the driver, or kernels=torch"),
    209: ("the library has no code for this GPU", "remove the folder of built kernels, or kernels=torch"),
}


class KernelError(MinimegatronError):
    """A launcher refused its arguments, or a kernel failed."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels compute: fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)


class Library:
    """A loaded kernel library.

    Args:
        path: path of the shared object.
        source: text of the kernel file, from which the launchers' signatures are read.
        target: `cuda`, `emulated` or `cpu`.
    """

    def __init__(self, path: Path, source: str, target: str) -> None:
        self.path, self.target = path, target
        self.emulated = target == "emulated"
        self._c = ctypes.CDLL(str(path))
        self._kinds = signatures(source)
        for name, kinds in self._kinds.items():
            function = getattr(self._c, name)
            function.argtypes, function.restype = kinds, ctypes.c_int
        pointer = ctypes.c_void_p
        self._launchers = {
            name: (getattr(self._c, name), [i for i, kind in enumerate(kinds[:-1]) if kind is pointer])
            for name, kinds in self._kinds.items()
        }
        if self.emulated:
            self._c.mm_emulator_message.restype = ctypes.c_char_p

    def call(self, name: str, *args: Any) -> None:
        """Run a launcher on the current stream; on a CPU, with torch's number of threads in the stream's place.

        Raises:
            KernelError: it returned an error.
        """
        function, pointers = self._launchers[name]
        count = len(self._kinds[name]) - 1
        assert len(args) == count, f"{name} takes {count} arguments and the stream, not {len(args)}"
        raw = list(args)
        for i in pointers:
            raw[i] = None if args[i] is None else args[i].data_ptr()
        stream = torch.get_num_threads() if self.target == "cpu" else None
        if self.target == "cuda":
            device = next(a.device for a in args if isinstance(a, torch.Tensor))
            stream = torch.cuda.current_stream(device).cuda_stream
        error = function(*raw, stream)
        if error:
            raise self._error(name, error, args)

    def ask(self, name: str, *args: Any) -> int:
        """The number that a launcher writes into its first argument, an int of the host; nothing is launched.

        Raises:
            KernelError: it returned an error.
        """
        answer = ctypes.c_int(0)
        error = getattr(self._c, name)(ctypes.addressof(answer), *args, None)
        if error:
            raise self._error(name, error, args)
        return answer.value

    def order(self, order: int) -> None:
        """Emulator: the order in which threads run; 0 forward, 1 backward, n > 1 shuffled by seed n."""
        self._c.mm_emulator_order(order)

    def counters(self) -> dict[str, int]:
        """Emulator: counters of all threads together since the last call."""
        four = (ctypes.c_longlong * 4)()
        self._c.mm_emulator_counters(four)
        return dict(zip(("blocks", "block_waits", "warp_waits", "atomics"), four, strict=True))

    def _error(self, name: str, error: int, args: Sequence[Any]) -> KernelError:
        shown = ", ".join(str(tuple(a.shape)) if isinstance(a, torch.Tensor) else str(a) for a in args)
        if error == BAD_ARGUMENT:
            return KernelError(f"{name} refused its arguments", where=shown, fix="see the checks in its .cu file")
        detail, fix = CUDA_ERRORS.get(error, ("see cudaError_t", "run it emulated to debug it"))
        if self.emulated:
            detail = self._c.mm_emulator_message().decode()
        return KernelError(f"{name} failed with error {error}: {detail}", where=shown, fix=fix)


def signatures(source: str) -> dict[str, list[Any]]:
    """Launcher -> ctypes of its arguments, from the text of a kernel file."""
    found = {}
    for name, arguments in re.findall(r"MM_EXPORT (\w+)\(([^)]*)\)", source):
        kinds = [" ".join(argument.split()[:-1]) for argument in arguments.split(",")]
        found[name] = [ctypes.c_void_p if "*" in kind else _KINDS[kind] for kind in kinds]
    return found


def load(name: str, target: str, source: str | None = None) -> Library:
    """Build and load a kernel file, or a learner's text in its place.

    Raises:
        KernelsUnavailable: see `build.library`.
    """
    path = build.library(name, target, source=source)
    return Library(path, build.source_of(name, target) if source is None else source, target)


@functools.cache
def library(name: str, target: str) -> Library:
    """`load`, cached for the process."""
    return load(name, target)


def run(name: str, launcher: str, like: torch.Tensor, *args: Any, native: bool = False) -> None:
    """Call a launcher of the file `name` on the device of `like`; on a CPU of the emulated `.cu`, or of the `.cpp`."""
    target = "cuda" if like.is_cuda else "cpu" if native else "emulated"
    if like.is_cuda:
        with torch.cuda.device(like.device):
            library(name, target).call(launcher, *args)
    else:
        library(name, target).call(launcher, *args)


# ------------------------------------------------------------------------------------------------------- operators


def operator(
    name: str,
    outputs: Callable[..., Any],
    *,
    keep: Callable[..., None] | None = None,
    grads: Callable[..., Any] | None = None,
    mutates: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: makes `torch.ops.minimegatron.NAME` of a function that launches.

    Args:
        outputs: from the operator's arguments, empty; raises `ConfigError` if they do not fit.
        keep: `(ctx, inputs, output)`, saves what the backward pass needs.
        grads: `(ctx, *output gradients)`, the gradients of the inputs.
        mutates: names of arguments that are written to.
    """

    def define(function: Callable[..., Any]) -> Any:
        kinds = ("cpu", "cuda")
        op = torch.library.custom_op(f"minimegatron::{name}", function, mutates_args=mutates, device_types=kinds)
        op.register_fake(outputs)
        without_compiler(getattr(op, "_backend_fns", {}).values())
        if grads is not None:
            op.register_autograd(grads, setup_context=keep)
        registered = getattr(torch.ops.minimegatron, name).default
        return (
            _directly(registered, function, keep, grads) if "native" in signature(function).parameters else registered
        )

    return define


PLAIN = (torch.Tensor, torch.nn.Parameter)


def _directly(
    registered: Callable[..., Any],
    function: Callable[..., Any],
    keep: Callable[..., None] | None,
    grads: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """`registered`; or, where the last argument `native` is True and nothing sees operators, `function` itself."""
    parameters = signature(function).parameters
    assert [*parameters][-1] == "native", f"the last parameter of {function.__qualname__} is not native"
    defaults, count = [p.default for p in parameters.values()][:-1], len(parameters)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            output = function(*args)
            if keep is not None:
                keep(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            assert grads is not None, "without a gradient the torch operator is called"
            return grads(ctx, *given)

    @functools.wraps(function)
    def call(*args: Any, native: bool = False) -> Any:
        if len(args) < count:
            args = (*args, *defaults[len(args) :], native)
        if not args[-1] or torch.compiler.is_compiling() or _observed():
            return registered(*args)
        needs_grad = False
        for x in args:
            if isinstance(x, torch.Tensor):
                if type(x) not in PLAIN:
                    return registered(*args)
                needs_grad = needs_grad or x.requires_grad
        if not (needs_grad and torch.is_grad_enabled()):
            return function(*args)
        return registered(*args) if grads is None else Direct.apply(*args)

    return call


def _observed() -> bool:
    """Whether a dispatch mode or a transform of functorch sees operators."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active()


MARK = "__dynamo_disable"  # where torch looks, in a function that it has marked as not to be compiled


def without_compiler(functions: Iterable[Any]) -> None:
    """Let functions that torch has marked as not to be compiled run without an import of the compiler.

    The first call of each would import `torch._dynamo` for its mark, which takes a CPU-second of every rank. What is
    put there instead calls the function itself while the compiler is not imported; from then on it is torch's own mark.
    """
    for function in functions:
        inner = getattr(function, "__wrapped__", None)
        while callable(inner):
            if not hasattr(inner, MARK):
                setattr(inner, MARK, _uncompiled(inner))
            inner = getattr(inner, "__wrapped__", None)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        from torch._dynamo import disable

        marked = disable(function, True, wrapping=False)  # type: ignore[no-untyped-call]
        setattr(function, MARK, marked)
        return marked(*args, **kwargs)

    return call


def check_float(op: str, name: str, x: torch.Tensor) -> None:
    """`x` has a dtype that kernels are compiled for."""
    if x.dtype not in DTYPES:  # asked at every call: the message is made when it is needed
        known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        require(False, f"{op}: {name} is {x.dtype}", f"cast it to one of {known}, or use the reference")


def check_same(op: str, x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """The others have the dtype and device of `x`."""
    for name, y in others.items():
        if y is not None and (y.dtype != x.dtype or y.device != x.device):
            require(
                False,
                f"{op}: {name} is {y.dtype} on {y.device}, the input {x.dtype} on {x.device}",
                "cast and move it yourself: kernels convert nothing in silence",
            )


def check_shape(op: str, **wanted: tuple[torch.Tensor | None, tuple[int, ...]]) -> None:
    """Each tensor has the shape beside it."""
    for name, (x, expected) in wanted.items():
        if x is not None and x.shape != expected:
            require(
                False,
                f"{op}: {name} is {tuple(x.shape)}, expected {tuple(expected)}",
                "see the operator's docstring for the shapes",
            )


CPU_PARTS = 16  # of the rows of a reduction: so many threads can share it, and the sums do not depend on their number


def parts_for(rows: int, device: torch.device, resident: int = 2) -> int:
    """The number of blocks that share the rows of a reduction: `resident` a multiprocessor, four if emulated."""
    if device.type != "cuda":
        return max(1, min(rows, 4))
    return max(1, min(rows, resident * torch.cuda.get_device_properties(device).multi_processor_count))


def like(x: torch.Tensor) -> torch.Tensor:
    """An empty, contiguous tensor of the shape and dtype of `x`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
