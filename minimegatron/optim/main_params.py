"""Main parameters, and the update of them.

The problem in a sentence: a bf16 weight of 1 does not change when 0.001 is added to it, so a 16-bit weight has an fp32
copy that is updated, and the model reads that copy rounded.

| the model's weight | main                        | bytes beside the weight         |
|--------------------|-----------------------------|---------------------------------|
| fp32               | its own memory              | 0                               |
| bf16, fp16         | an fp32 copy, written back  | 4                               |
| any                | kept by the `Update`        | see `optim/precision_aware.py`  |

A sharded optimizer updates a range of the flattened parameter (`piece`); main, gradient and state cover that range.

An `Update` takes gradients and the factor that unscales and clips them, updates the main parameters and writes them
back into the model. `MixedPrecisionOptimizer` decides whether to step; the `Update` alone knows the algorithm, and
where and in which dtype main parameters and moments are kept.

| class            | file                       | computes                                                           |
|------------------|----------------------------|--------------------------------------------------------------------|
| `TorchUpdate`    | here                       | by a `torch.optim.Optimizer`; AdamW by a kernel if there is one    |
| `PrecisionAware` | `optim/precision_aware.py` | AdamW in fp32, on state that is kept in 8 or 16 bits               |
| `Offloaded`      | `optim/offload.py`         | some parameters on the host, the others by another `Update`        |

Micikevicius et al. 2017 (arXiv 1710.03740). Megatron-LM: `Float16OptimizerWithFloat16Params` in
`megatron/core/optimizer/optimizer.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.kernels import ops
from minimegatron.kernels.optimizer import Tables
from minimegatron.layers.param import layout_of
from minimegatron.optim.clip import counts_here
from minimegatron.optim.groups import Rates, rates_of


class Shard(Protocol):
    """The part of a parameter that a rank updates (`parallel/data/data_parallel.Shard`).

    Attributes:
        piece: elements of the flattened parameter; None for all of it.
        grad: their gradients.
        data: their weights, in the model's dtype.
    """

    @property
    def piece(self) -> slice | None: ...
    @property
    def grad(self) -> torch.Tensor: ...
    @property
    def data(self) -> torch.Tensor: ...


@dataclasses.dataclass(frozen=True)
class MainParam:
    """A parameter of the optimizer.

    Attributes:
        name: logical name.
        model: the parameter of the model.
        main: the tensor that is updated: an fp32 copy of a 16-bit parameter, else the parameter's own memory; also the
            latter if an `Update` keeps the copy in another form or place (`config.fp32_copies` is off).
        piece: range of the flattened parameter that `main` covers; None for all of it.
        counts_here: whether this rank counts its gradient in the norm.
        rates: learning rate and weight decay.
        grad: the gradient of `main`; None: the model's `main_grad` or `grad`.
        data: the weights that `main` covers; None: in the model.
    """

    name: str
    model: nn.Parameter
    main: torch.Tensor
    piece: slice | None
    counts_here: bool
    rates: Rates
    grad: torch.Tensor | None = None
    data: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        name: str,
        model: nn.Parameter,
        mesh: Mesh,
        config: OptimizerConfig,
        shard: Shard | None = None,
        owned: bool = False,
    ) -> MainParam:
        """Wrap one parameter, or a part of it; `owned` if no other replica updates it."""
        layout, piece = layout_of(model), shard.piece if shard else None
        part = shard.data if shard else model.detach()
        counts = counts_here(layout, mesh, owned or piece is not None)
        grad, data = (shard.grad, shard.data) if shard else (None, None)
        param = cls(name, model, part, piece, counts, rates_of(name, layout, config), grad, data)
        return param.with_copy() if config.fp32_copies else param

    def with_copy(self) -> MainParam:
        """The same parameter with an fp32 copy as `main`, if it has 16 bits."""
        half = self.model.dtype in (torch.bfloat16, torch.float16)
        return dataclasses.replace(self, main=self.model_part.float()) if half else self

    @property
    def model_part(self) -> torch.Tensor:
        """The weights that `main` covers, in the model's memory or its shard."""
        return self.model.detach() if self.data is None else self.data

    @property
    def is_copy(self) -> bool:
        """Whether `main` is a copy that must be written back."""
        return self.main.dtype != self.model.dtype

    def read_grad(self) -> torch.Tensor | None:
        """The gradient of `main`; None if the backward pass did not reach the parameter."""
        if self.grad is not None:
            return self.grad
        grad = getattr(self.model, "main_grad", None)
        grad = self.model.grad if grad is None else grad
        return None if grad is None else _part(grad, self.piece)


def _part(x: torch.Tensor, piece: slice | None) -> torch.Tensor:
    """A view of the whole tensor, or of a range of it, flattened."""
    return x if piece is None else x.view(-1)[piece]


Ready = Sequence[tuple[MainParam, torch.Tensor]]  # (parameter, gradient); parameters without a gradient are absent


class Update(Protocol):
    """The interface of an update, as in the module docstring.

    Attributes:
        param_groups: torch's parameter groups.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self, ready: Ready, factor: float) -> None:
        """Update the main parameters by gradients times `factor`, and the model's weights."""

    def tensors(self, p: MainParam) -> dict[str, torch.Tensor]:
        """The state for a checkpoint: references, or fp32 copies of tensors that are stored in another form."""

    def load(self, p: MainParam, saved: Mapping[str, torch.Tensor]) -> None:
        """Load what `tensors` returned, and write the model's weights."""

    def reload(self, p: MainParam) -> None:
        """Make the main parameter equal to the model's weights, after these were loaded."""

    def held(self) -> dict[str, list[torch.Tensor]]:
        """{owner: tensors} that live as long as the optimizer, without scalars."""


class TorchUpdate:
    """An update by an optimizer with torch's interface, whose state is keyed by main parameter.

    Args:
        params: the parameters that are updated.
        inner: the optimizer of their main parameters.
        kernels: `config.kernels` of the model; AdamW may be computed by a kernel.
    """

    def __init__(self, params: Sequence[MainParam], inner: torch.optim.Optimizer | Chain, kernels: str) -> None:
        self.params, self.inner, self.kernels = params, inner, kernels
        self._tables = Tables()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def tensors(self, p: MainParam) -> dict[str, torch.Tensor]:
        tensors = {k: v for k, v in self.inner.state[p.main].items() if torch.is_tensor(v)}
        return {**tensors, "fp32_param": p.main.detach()} if p.is_copy else tensors

    def load(self, p: MainParam, saved: Mapping[str, torch.Tensor]) -> None:
        for key, tensor in self.tensors(p).items():
            tensor.copy_(saved[key])
        self._tables.steps.clear()
        write_back([p])

    def reload(self, p: MainParam) -> None:
        if p.is_copy:
            p.main.copy_(p.model_part)

    def held(self) -> dict[str, list[torch.Tensor]]:
        state = [v for p in self.params for v in self.inner.state[p.main].values() if torch.is_tensor(v)]
        return {"main parameters": [p.main for p in self.params if p.is_copy], "moments": [t for t in state if t.dim()]}

    def step(self, ready: Ready, factor: float) -> None:
        """See `Update`. Consumes the gradients."""
        mains, grads = [p.main for p, _ in ready], [grad for _, grad in ready]
        copies = [p.model_part if p.is_copy else None for p, _ in ready]
        ops.optimizer_step(self.inner, mains, grads, copies, factor, self._tables, kernels=self.kernels)


class Chain:
    """Several of torch's optimizers as one: each has its own groups, and they share one state.

    Args:
        optimizers: over different parameters.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        self.state = optimizers[0].state
        for optimizer in optimizers[1:]:
            self.state |= optimizer.state
            optimizer.state = self.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers themselves, so that a scheduler may write into them."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """One step of each."""
        for optimizer in self._optimizers:
            optimizer.step()


def batches(ready: Ready, most: int) -> list[Ready]:
    """Split into batches of at most `most` elements, or of one parameter."""
    parts: list[list[tuple[MainParam, torch.Tensor]]] = []
    elements = most
    for p, grad in ready:
        if elements + grad.numel() > most:
            parts.append([])
            elements = 0
        parts[-1].append((p, grad))
        elements += grad.numel()
    return list(parts)


def write_back(params: Sequence[MainParam]) -> None:
    """Round main parameters that are copies into the model."""
    copies = [p for p in params if p.is_copy]
    if copies:
        torch._foreach_copy_([p.model_part for p in copies], [p.main for p in copies])
