"""The choice of `attention_backend auto`: a table of GPUs, dtypes and masks.

| GPU                          | plain or causal | documents, window                                   |
|------------------------------|-----------------|-----------------------------------------------------|
| none (CPU)                   | `local`, `sdpa` | `sdpa`, with a table                                |
| 7.x and older                | `sdpa`          | `sdpa`, with a table                                |
| 8.x (Ampere, Ada)            | `flash`, `sdpa` | `flash`, `varlen`, `sdpa` with a table              |
| 9.0 and newer (Hopper on)    | `sdpa`          | `flash`, `varlen`, `sdpa` with a table              |
| any, fp32 or fp64            | `sdpa`          | `sdpa`, with a table                                |
| any, keys on other ranks     | `sdpa`, in pieces (`pieces.py`)                                       ||
| any, scores with a cap       | `local`; with dropout of weights `reference`                          ||
| any, a sink                  | as keys on other ranks; with dropout of weights `reference`           ||

`auto` is the first backend of a cell that is installed and supports these heads. `local` on a CPU is the package's own
kernel (`csrc/flash_attention.cpp`), for heads of at most 128 channels without dropout, where `kernels` is `auto` and
there is a compiler. `flash` is the flash-attn package, version 2; `varlen` is the FlashAttention-2 inside torch
(`torch.nn.attention.varlen.varlen_attn`, from torch 2.12 on with windows and grouped heads), called with the documents'
boundaries.

- On 9.0 and 10.0 torch's function prefers cuDNN's attention to FlashAttention-2 (torch 2.13,
  `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, `check_prefer_cudnn_attention`). FlashAttention-2 reaches 35 %
  of an H100's peak, kernels that use Hopper's own instructions about twice that (Shah et al. 2024, arXiv 2407.08608,
  section 1). So flash-attn 2 would make plain attention slower there.
- On 8.x FlashAttention-2 is the fastest (Dao 2023, arXiv 2307.08691), and torch has a copy of it.
- Documents and windows reach torch's function as a table of s x s entries, which only its slower kernels take, and
  every pair is computed. FlashAttention-2 takes the boundaries and skips pairs that are not visible.
- FlashAttention-2 needs 16 bits, a GPU of 8.0 or newer, and heads of at most 256 channels; `varlen_attn` also needs a
  multiple of 8 channels, and has no dropout.

Of this the project has timed the row of CPUs alone (`benchmarks/RECORDS.md`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
from typing import TYPE_CHECKING

import torch

from minimegatron.errors import ConfigError
from minimegatron.kernels import choice as kernels
from minimegatron.kernels.flash import MAX_HEAD

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config.model import TransformerConfig

PACKAGES = {"flash": ("flash_attn", "flash-attn"), "te": ("transformer_engine", "transformer-engine[pytorch]")}
HALF = (torch.bfloat16, torch.float16)
FLASH_HEAD = 256


@dataclasses.dataclass(frozen=True)
class Machine:
    """The device and the installed packages that could compute attention.

    Attributes:
        capability: of the GPU, such as (9, 0); None on a CPU.
        programs: which of `flash` and `varlen` are installed; on a CPU `local`, if its kernel can be built.
    """

    capability: tuple[int, int] | None
    programs: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Task:
    """The properties of an attention that decide which backends can compute it.

    Attributes:
        dtype: dtype of queries, keys and values.
        head: channels of a query and a key.
        value: channels of a value.
        rule: whether the mask has documents, or a window shorter than the sequence.
        dropout: whether attention weights are dropped.
    """

    dtype: torch.dtype
    head: int
    value: int
    rule: bool = False
    dropout: bool = False


def fastest(machine: Machine, task: Task) -> str:
    """`local`, `flash`, `varlen` or `sdpa`: the table of this module."""
    if machine.capability is None:
        plain = not task.rule and not task.dropout and task.head == task.value <= MAX_HEAD
        return "local" if plain and "local" in machine.programs else "sdpa"
    if not _flash_kernel(machine, task):
        return "sdpa"
    if task.rule:
        usable = ["flash"]
        if not task.dropout and task.head % 8 == 0:
            usable.append("varlen")
    else:
        usable = ["flash"] if machine.capability < (9, 0) and task.value == task.head else []  # type: ignore[operator]
    return next((program for program in usable if program in machine.programs), "sdpa")


def groups_share(machine: Machine, task: Task) -> bool:
    """Whether torch's function computes grouped heads without copies of keys and values, and without an s x s matrix.

    FlashAttention-2 and cuDNN do, in 16 bits and without a table. Up to torch 2.13 the backend for all other cases
    (fp32, tables) needs as many key heads as query heads; with fewer, torch falls back to the formula and stores its
    matrix of weights, which is much larger than a copy of the keys.
    """
    fits = _flash_kernel(machine, task) and task.head == task.value
    return machine.capability is None or (fits and not task.rule)


def _flash_kernel(machine: Machine, task: Task) -> bool:
    """Whether a FlashAttention-2 kernel takes such heads on this GPU."""
    on_gpu = machine.capability is not None and machine.capability >= (8, 0)
    return on_gpu and task.dtype in HALF and max(task.head, task.value) <= FLASH_HEAD


def installed(backend: str) -> bool:
    """Whether the package of a backend is installed."""
    if backend == "varlen":
        return _varlen_there()
    return backend not in PACKAGES or importlib.util.find_spec(PACKAGES[backend][0]) is not None


def this_machine(device: torch.device) -> Machine:
    """The `Machine` for tensors on `device`."""
    if device.type != "cuda":
        return Machine(None, frozenset() if kernels.obstacle("cpu") else frozenset({"local"}))
    programs = frozenset(name for name in ("flash", "varlen") if installed(name))
    return Machine(torch.cuda.get_device_capability(device), programs)


NAMES = {
    "local": "the package's kernel",
    "sdpa": "torch's scaled_dot_product_attention",
    "flash": "flash-attn",
    "varlen": "torch's varlen_attn",
}


def in_words(machine: Machine) -> str:
    """The choice of `auto` on this machine in bf16, as a sentence."""
    if machine.capability is None:
        plain, rule = (NAMES[fastest(machine, Task(torch.bfloat16, 128, 128, rule))] for rule in (False, True))
        return plain if plain == rule else f"{plain}; documents and windows: {rule}"
    plain, rule = (NAMES[fastest(machine, Task(torch.bfloat16, 128, 128, rule))] for rule in (False, True))
    cudnn = " (cuDNN first)" if plain == NAMES["sdpa"] and machine.capability in ((9, 0), (10, 0)) else ""
    return f"sm_{machine.capability[0]}{machine.capability[1]}: {plain}{cudnn}; documents and windows: {rule}"


@functools.cache
def _varlen_there() -> bool:
    """Whether torch has variable-length attention with windows and grouped heads, which came later than the
    function."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def check_backend(backend: str) -> None:
    """Refuse a backend whose package is missing.

    Raises:
        ConfigError: with what to install.
    """
    if not installed(backend):
        package = PACKAGES[backend][1]
        raise ConfigError(
            f"attention_backend {backend!r} needs the package {package}, which is not installed",
            fix=f"pip install '{package}' on a machine with a GPU, or choose attention_backend auto",
        )


def choose_backend(config: TransformerConfig, mesh: Mesh) -> str:
    """`config.attention_backend`, checked; `auto` stays, to be decided for each mask by `fastest`.

    Raises:
        ConfigError: its package is not installed, or it does not run on this device or in this dtype.
    """
    name, on_gpu = config.attention_backend, mesh.device.type == "cuda"
    if name == "auto" and config.attn_logit_softcapping is not None:
        return "local" if config.attention_dropout == 0.0 else "reference"
    if name == "auto" and config.has_sinks and config.attention_dropout > 0.0:
        return "reference"
    if name == "auto":
        # pieces of a ring on a GPU are computed by torch's function
        waits = mesh.cp_outer.size == 1 if on_gpu else config.kernels == "auto"
        return "auto" if waits else "sdpa"
    check_backend(name)
    if name in PACKAGES and not (on_gpu and config.dtype in HALF):
        raise ConfigError(
            f"attention_backend {name!r} runs on a GPU in bf16 or fp16; this model is {config.params_dtype} on "
            f"{mesh.device.type}",
            fix="params_dtype=bf16 on a GPU, or attention_backend auto",
        )
    return name
