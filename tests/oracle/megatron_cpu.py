"""Make megatron-core 0.16.1 run on a machine without a GPU, with torch's CPU build and gloo.

Megatron takes a GPU for granted: it allocates with `device="cuda"`, chooses code paths by `tensor.type() ==
"torch.cuda.FloatTensor"`, and asks `torch.cuda` for streams and generator states. Three substitutions are enough:

| Megatron does                                  | it gets                                       | by               |
|------------------------------------------------|-----------------------------------------------|------------------|
| `torch.zeros(..., device="cuda")`, `x.cuda()`  | the CPU                                       | `CudaMeansCpu`   |
| `torch.cuda.current_stream()`, `get_rng_state` | streams that do nothing, the CPU's generator  | `install`        |
| `WrappedTorchNorm` under sequence parallelism  | torch's norm with its parameters flagged      | `patch_megatron` |

The last one is Megatron's own: its torch fallback norm refuses sequence parallelism, because only the fused norms mark
their weights as "partial gradient, sum it over tp".

`CudaMeansCpu` may be used alone as a context manager and leaves nothing behind. `install` and `patch_megatron` change
torch and Megatron for the rest of the process: call them only in a process of your own.
"""

from __future__ import annotations

import contextlib
import logging
import types
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def _to_cpu(argument: Any) -> Any:
    """The CPU for anything that names a CUDA device; everything else unchanged."""
    if isinstance(argument, str | torch.device) and str(argument).startswith("cuda"):
        return torch.device("cpu")
    return argument


class CudaMeansCpu(TorchFunctionMode):
    """While active, every CUDA device named to a torch function is the CPU, and `tensor.type()` says `torch.cuda.*`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(_to_cpu(a) for a in args)
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class _NoStream:
    """A stream or an event: everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        answers = {"query": True, "elapsed_time": 0.0, "record_event": self}
        return lambda *_, **__: answers.get(name)


def quiet() -> None:
    """Silence Megatron's warnings about missing Apex and Transformer Engine; the CPU twins are what is wanted."""
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)


def install() -> None:
    """Replace the parts of `torch.cuda` that Megatron calls, and enter `CudaMeansCpu` for good."""
    quiet()
    stream = _NoStream()
    replacements: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "Stream": _NoStream,
        "Event": _NoStream,
        "stream": lambda *_: contextlib.nullcontext(),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "get_device_capability": lambda *_: (8, 0),
        "get_device_properties": lambda *_: types.SimpleNamespace(multi_processor_count=1, major=8, minor=0),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = replacements["get_rng_state"]
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    CudaMeansCpu().__enter__()


def patch_megatron() -> None:
    """Patch Megatron itself; call after `install` and before building anything."""
    import megatron.core.jit

    megatron.core.jit.disable_jit_fuser()  # it would hand every small function to torch.compile

    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.torch_norm as torch_norm

    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()

    def new_norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = staticmethod(new_norm)
