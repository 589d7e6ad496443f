"""The interface of a data-parallel model: what a training step asks of it, whichever class sums its gradients.

| class                     | file                       | sharded over the replicas                | used by  |
|---------------------------|----------------------------|------------------------------------------|----------|
| `DistributedDataParallel` | `parallel/data/ddp`        | nothing, or ZeRO-1, -2, -3; written here | training |
| `TorchFSDP2`              | `parallel/data/torch_fsdp` | ZeRO-3, by torch's `fully_shard`         | training |
| `PlainDataParallel`       | `parallel/data/plain`      | nothing                                  | readers  |
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
        grad: their gradients after `finish_grad_sync`, flat if there is a piece.
        data: their weights; a view of the model's weights, or of the shard from which these are gathered.
    """

    piece: slice | None
    grad: torch.Tensor
    data: torch.Tensor


class DataParallel(nn.Module):
    """A model that is replicated over data-parallel ranks.

    Args:
        module: the model of this rank.
        mesh: its layout.

    Attributes:
        loss_names: "training" or "evaluation" -> names of the losses that the last pipeline stage reports, once it has
            sent them (`training/reports`).
        rounds_to: the 16-bit dtype of a model whose weights are kept in fp32 and rounded when they are gathered.
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
        """The dtype in which the model computes; None without parameters."""
        weight = next(self.module.parameters(), None)
        return None if weight is None else weight.dtype

    def name_of(self, param: torch.Tensor) -> str:
        """The logical name of one of the trainable parameters."""
        return self.names[param]

    @functools.cached_property
    def names(self) -> dict[torch.Tensor, str]:
        """The logical name of every trainable parameter."""
        return {param: name for name, param in self.params.items()}

    def ready(self, names: Iterable[str]) -> None:
        """The last gradients of the step of these parameters are complete: their buckets may be reduced."""

    @contextlib.contextmanager
    def sync_only(self, names: Collection[str]) -> Iterator[None]:
        """In the block only these parameters get their last gradient of the step; others are only accumulated."""
        yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In the block gradients are only accumulated: for every microbatch of a step but the last."""
        with self.sync_only(()):
            yield

    @contextlib.contextmanager
    def backward_pass(self, module: nn.Module | None = None) -> Iterator[None]:
        """Around the backward pass of one microbatch through `module` (default: the whole model)."""
        yield

    def release_weights(self) -> None:
        """Free weights that were gathered for a backward pass."""

    def end_evaluation(self) -> None:
        """Free weights that forward passes without a backward pass have left gathered."""

    def zero_grad_buffer(self) -> None:
        """Zero the gradients; called at the start of every step."""
        raise NotImplementedError

    def finish_grad_sync(self) -> None:
        """Wait until gradients, or shards of them, are sums over the replicas; called once a step."""

    def divide_gradients(self, divisor: torch.Tensor) -> None:
        """Divide every gradient."""
        raise NotImplementedError

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        """Multiply every gradient."""
        raise NotImplementedError

    def shards(self) -> dict[str, Shard]:
        """{logical name: the part of the parameter that this rank updates}; parameters without a part here are left
        out."""
        raise NotImplementedError

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """{logical name: whole gradient}, gathered from the shards of all replicas, for checks; training does not need
        it."""
        raise NotImplementedError

    def held(self) -> dict[str, list[torch.Tensor]]:
        """{owner: tensors} that last from step to step (`memory.Tracker`): parameters, gradients, messages."""
        raise NotImplementedError

    def start_param_gather(self) -> None:
        """Gather the weights, or begin to: the optimizer has updated the shards."""

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """In the block every weight is whole: for code that reads weights outside of a forward pass."""
        yield
