"""What a training step asks of the replicas of a model, whoever sums their gradients.

| class                     | file                     | shares out                               |
|---------------------------|--------------------------|------------------------------------------|
| `DistributedDataParallel` | `parallel/data/ddp.py`        | nothing, or ZeRO-1, -2, -3; written here |
| `TorchFSDP2`              | `parallel/data/torch_fsdp.py` | ZeRO-3, by torch's `fully_shard`         |
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.layers.param import logical_parameters


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of a parameter that this rank updates.

    Attributes:
        piece: elements of the flattened parameter; None for all of it.
        grad: their gradients after `finish_grad_sync`, flat where there is a piece.
        data: the weights themselves; a view of what the model reads, or of what that is gathered from.
    """

    piece: slice | None
    grad: torch.Tensor
    data: torch.Tensor


class DataParallel(nn.Module):
    """A model and its replicas.

    Args:
        module: the model of this rank.
        mesh: its layout.

    Attributes:
        loss_names: "training" or "evaluation" -> names of the losses that the last pipeline stage reports, once it has
            sent them (`training/reports`).
        rounds_to: of 16-bit models whose weights are kept in fp32 and rounded when they are gathered: the 16-bit dtype.
    """

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        self.module, self.mesh = module, mesh
        self.loss_names: dict[str, list[str]] = {}
        self.rounds_to: torch.dtype | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Every trainable parameter by its logical name."""
        return {name: param for name, param in logical_parameters(self.module) if param.requires_grad}

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """In which the model computes; None without parameters."""
        weight = next(self.module.parameters(), None)
        return None if weight is None else weight.dtype

    def name_of(self, param: torch.Tensor) -> str:
        """The logical name of one of the trainable parameters."""
        raise NotImplementedError

    def ready(self, names: Iterable[str]) -> None:
        """These gradients are complete for this step: they may travel."""

    @contextlib.contextmanager
    def sync_only(self, names: Collection[str]) -> Iterator[None]:
        """Only accumulate, but for these parameters, whose last gradient of the step is computed in the block."""
        yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate; for every microbatch of a step but the last."""
        with self.sync_only(()):
            yield

    @contextlib.contextmanager
    def backward_pass(self, module: nn.Module | None = None) -> Iterator[None]:
        """Around what produces gradients of one microbatch, of parameters of `module` (default: of all)."""
        yield

    def release_weights(self) -> None:
        """A backward pass has ended: let go of weights that were gathered for it."""

    def zero_grad_buffer(self) -> None:
        """Forget the gradients; call at the start of every step."""
        raise NotImplementedError

    def finish_grad_sync(self) -> None:
        """After this gradients, or shards of them, are sums over the replicas. Call once a step, after the passes."""

    def divide_gradients(self, divisor: torch.Tensor) -> None:
        """Divide every gradient."""
        raise NotImplementedError

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        """Multiply every gradient."""
        raise NotImplementedError

    def shards(self) -> dict[str, Shard]:
        """What this rank updates, by the parameter's logical name; a parameter may have no part here."""
        raise NotImplementedError

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """Every gradient whole, from the shards of all replicas (a check wants them; training does not)."""
        raise NotImplementedError

    def held(self) -> dict[str, list[torch.Tensor]]:
        """{owner: tensors} that last from step to step (`memory.Tracker`): parameters, gradients, and buffers."""
        raise NotImplementedError

    def start_param_gather(self) -> None:
        """The shards of the weights are new: put them together again, or begin to."""

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """In the block every weight is whole: for what reads weights outside of a forward pass."""
        yield
