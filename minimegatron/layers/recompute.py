"""Recompute: a second forward pass instead of the memory of activations.

Keep a function's *inputs*, drop its activations, and run it again when the gradient arrives. For a whole layer that
keeps 2 s b h bytes (bf16) instead of about s b h (34 + 5 a s / h), at the price of one more forward pass (33 % more
work). For the core attention alone it drops the 5 a s^2 b term, at a price of 1-5 %.

| granularity          | kept per layer      | where                                                         |
|----------------------|---------------------|---------------------------------------------------------------|
| selective            | all but the named modules' activations | `core_attn`, `mlp`, `layernorm`                 |
| full, uniform, n     | 1/n of a layer input | every n layers as one function                               |
| full, block, n       | a layer input for the first n layers of a stage, everything for the rest                     |

The second run must draw the same random numbers: torch's checkpoint restores the default generators, and here the named
streams are restored as well. Otherwise the dropout masks differ between the runs: no error, wrong gradients. Numbers
that the host has read in the first run (how many rows an expert gets) are kept for the second, which need not wait for
the device again: `to_host`.

Chen et al. 2016 (arXiv 1604.06174); Korthikanti et al. 2022 (arXiv 2205.05198) section 5. Megatron-LM:
`tensor_parallel/random.py` (`checkpoint`), `transformer/transformer_block.py` (`_checkpointed_forward`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from minimegatron.comm.random import RngStreams

Numbers = list[int]
Read = Callable[[torch.Tensor, Callable[[], Numbers] | None], Numbers]
_READ: ContextVar[Read | None] = ContextVar("how a run reads its device", default=None)
MICROBATCH: ContextVar[int] = ContextVar("the microbatch of a forward pass, for who watches one", default=0)


def recompute(function: Callable[..., Any], *args: Any, rng: RngStreams | None = None) -> Any:
    """`function(*args)`; activations inside of it are recomputed in the backward pass.

    Args:
        function: deterministic except for torch's generators and the streams of `rng`.
        args: its inputs; they are kept.
        rng: the streams it may draw from.
    """
    kept: list[Numbers] = []
    draws: Callable[[], Any] = contextlib.nullcontext if rng is None else partial(rng.replay, rng.snapshot())
    runs = _Run(partial(_first, kept)), _Run(partial(_second, kept), draws, MICROBATCH.get())
    return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: runs)


def recompute_module(module: nn.Module, rng: RngStreams | None = None) -> None:
    """From now on `module(...)` is recomputed in training mode. In place: its parameters keep their names."""

    def forward(self: nn.Module, *args: Any) -> Any:
        inside = partial(type(self).forward, self)
        return recompute(inside, *args, rng=rng) if self.training else inside(*args)

    module.forward = MethodType(forward, module)


def to_host(x: torch.Tensor, expected: Callable[[], Numbers] | None = None) -> Numbers:
    """The values of the integer tensor `x` [n]. The host waits for the device, but not in the second run of
    `recompute`.

    Args:
        x, expected: see `numbers_of`.
    """
    read = _READ.get() or numbers_of
    return read(x, expected)


def numbers_of(x: torch.Tensor, expected: Callable[[], Numbers] | None = None) -> Numbers:
    """The values of `x` [n] as a list; of a scalar its value.

    Args:
        x: the tensor.
        expected: gives the values where tensors have none, because a plan runs them (`footprint/dry_run`).
    """
    if expected is None or not (x.is_meta or is_fake(x)):
        return x.tolist()  # type: ignore[no-any-return]
    with _disable_current_modes():
        return expected()


def _first(kept: list[Numbers]) -> Read:
    def read(x: torch.Tensor, expected: Callable[[], Numbers] | None) -> Numbers:
        kept.append(numbers_of(x, expected))
        return kept[-1]

    return read


def _second(kept: list[Numbers]) -> Read:
    numbers = iter(kept)
    return lambda x, expected: next(numbers)


class _Run:
    """One run of the function; it may be entered again, because a retained graph can be run backward more than once.

    Args:
        reads: makes the context in which `to_host` reads.
        draws: makes the context of the generators.
        microbatch: the microbatch of a second run, which a backward pass begins; None for a first run.
    """

    def __init__(
        self,
        reads: Callable[[], Read],
        draws: Callable[[], Any] = contextlib.nullcontext,
        microbatch: int | None = None,
    ) -> None:
        self._reads, self._draws, self._microbatch = reads, draws, microbatch

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._draws())
        self._stack.callback(_READ.reset, _READ.set(self._reads()))
        if self._microbatch is not None:
            self._stack.callback(MICROBATCH.reset, MICROBATCH.set(self._microbatch))

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)
