"""The host updates a share of the parameters, in its own memory (`--optimizer-cpu-offload`).

The problem in a sentence: AdamW's 12 bytes a parameter are touched once a step, and a host has ten times the memory of
a GPU; but the bus is fifty times slower than the GPU's memory, so copies must overlap with computation.

    GPU     step of its own share                                                  | weights of the next step
    down    | gradients 1 | gradients 2 | gradients 3 |
    host                  | AdamW 1     | AdamW 2     | AdamW 3     |
    up                                  | weights 1   | weights 2   | weights 3 |        two more streams

Gradients are copied down (4 bytes), weights up in the model's dtype (2), which the host rounds. With
`--overlap-cpu-optimizer-d2h-h2d` each direction has its own stream and is cut into chunks of `CHUNK` elements; without
it all gradients are copied, then the host computes, then all weights are copied.

| on the host          | bytes per element       | as                        |
|----------------------|-------------------------|---------------------------|
| main parameter       | 4                       | `main parameters (host)`  |
| moments              | 8 (AdamW), 4 (SGD)      | `moments (host)`          |
| gradient             | 4                       | `gradients (host)`        |
| weight to be sent up | 2, or 0: it is the main | `parameters (host)`       |

Parameters are taken whole, in the order of the groups, until the fraction of the elements is reached, as Megatron does.
Without a GPU both sides are the CPU; copies are then plain ones, and every weight comes out as without offload, bit for
bit.

Megatron-LM: `HybridDeviceOptimizer` in `megatron/core/optimizer/cpu_offloading`, with an optimizer for each parameter.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from minimegatron.config import OptimizerConfig
from minimegatron.optim.main_params import MainParam, Ready, Update, batches

CHUNK = 1 << 22  # elements
Pair = tuple[MainParam, MainParam]  # a parameter, and what the host has of it


class Offloaded:
    """An update of which a part runs on the host, as in the module docstring.

    Args:
        pairs: the offloaded parameters, and their copies on the host.
        host: the update of these copies.
        others: parameters that are not offloaded.
        device: the update of these.
        config: says what is pinned and whether copies overlap.
    """

    def __init__(
        self, pairs: Sequence[Pair], host: Update, others: Sequence[MainParam], device: Update, config: OptimizerConfig
    ) -> None:
        self._host, self._device = host, device
        self._pairs, self._others = {p.name: h for p, h in pairs}, {p.name: p for p in others}
        self._grads = {p.name: empty_on_host(p.main, h.main.dtype, config.pin_cpu_grads) for p, h in pairs}
        self._overlap = config.overlap_cpu_optimizer_d2h_h2d
        source = pairs[0][0].main.device if pairs else torch.device("cpu")
        self._gpu = source if source.type == "cuda" else None
        two = self._gpu is not None and self._overlap
        self._down, self._up = (torch.cuda.Stream(self._gpu) if two else None for _ in range(2))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of both updates themselves, so that a scheduler may write into them."""
        return [*self._host.param_groups, *self._device.param_groups]

    def step(self, ready: Ready, factor: float) -> None:
        """See `Update`. Consumes the gradients of parameters that are not offloaded."""
        chunks = [(chunk, self._copy_down(chunk)) for chunk in self._chunks(ready)]
        self._device.step([(self._others[p.name], grad) for p, grad in ready if p.name in self._others], factor)
        for chunk, arrived in chunks:
            if arrived is not None:
                arrived.synchronize()
            self._host.step([(self._pairs[p.name], self._grads[p.name]) for p, _ in chunk], factor)
            with _on(self._up):
                for p, _ in chunk:
                    p.model_part.copy_(self._pairs[p.name].model_part, non_blocking=True)
        if self._up is not None:
            torch.cuda.current_stream(self._gpu).wait_stream(self._up)

    def _copy_down(self, chunk: Ready) -> torch.cuda.Event | None:
        """Start to copy gradients to the host; returns the event of their arrival."""
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(self._gpu))
        with _on(self._down):
            for p, grad in chunk:
                self._grads[p.name].copy_(grad, non_blocking=True)
            return torch.cuda.current_stream(self._gpu).record_event() if self._gpu is not None else None

    def _chunks(self, ready: Ready) -> list[Ready]:
        """The offloaded gradients in chunks that are copied one after the other."""
        offloaded = [(p, grad) for p, grad in ready if p.name in self._pairs]
        most = CHUNK if self._overlap else sum(grad.numel() for _, grad in offloaded)
        return batches(offloaded, most)

    def tensors(self, p: MainParam) -> dict[str, torch.Tensor]:
        h = self._pairs.get(p.name)
        return self._device.tensors(self._others[p.name]) if h is None else self._host.tensors(h)

    def load(self, p: MainParam, saved: Mapping[str, torch.Tensor]) -> None:
        h = self._pairs.get(p.name)
        if h is None:
            self._device.load(self._others[p.name], saved)
            return
        self._host.load(h, saved)
        if h.is_copy:
            p.model_part.copy_(h.model_part)
        else:  # the weight is not in `saved`: it is the model's, and has been loaded there
            h.main.copy_(p.model_part)

    def reload(self, p: MainParam) -> None:
        h = self._pairs.get(p.name)
        if h is None:
            self._device.reload(self._others[p.name])
            return
        h.model_part.copy_(p.model_part)
        self._host.reload(h)

    def held(self) -> dict[str, list[torch.Tensor]]:
        return {
            **self._device.held(),
            "main parameters (host)": [h.main for h in self._pairs.values()],
            "moments (host)": self._host.held()["moments"],
            "gradients (host)": list(self._grads.values()),
            "parameters (host)": [h.model_part for h in self._pairs.values() if h.is_copy],
        }


def first_of(sizes: Sequence[int], fraction: float) -> int:
    """How many of the first parameters make up the fraction of all elements; the last of them is taken whole."""
    target, taken = fraction * sum(sizes), 0
    for count, size in enumerate(sizes):
        if taken >= target:
            return count
        taken += size
    return len(sizes)


def on_host(p: MainParam, pin: bool) -> MainParam:
    """The copy of a parameter on the host: an fp32 main, and the weight to send back (the main itself in fp32)."""
    part = p.model_part
    main = empty_on_host(part, torch.promote_types(part.dtype, torch.float32), pin)
    main.copy_(part)
    data = main if main.dtype == part.dtype else empty_on_host(part, part.dtype, pin)
    return dataclasses.replace(p, main=main, grad=None, data=data)


def empty_on_host(like: torch.Tensor, dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """Memory of the host, pinned if a GPU copies from or to it."""
    device = "cpu" if like.device.type == "cuda" else like.device
    return torch.empty(like.shape, dtype=dtype, device=device, pin_memory=pin and like.is_cuda)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
