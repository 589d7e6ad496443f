"""A parameter as the optimizer sees it: the numbers that are updated, and whose copies the model reads.

The problem in a sentence: a bf16 weight of 1 does not move when 0.001 is added to it, so 16-bit weights have an fp32
copy that takes the steps, and the model's own is that copy rounded.

| the model's weight | main                        | bytes besides the weight |
|--------------------|-----------------------------|--------------------------|
| fp32               | its own memory              | 0                        |
| bf16, fp16         | an fp32 copy, written back  | 4                        |
| any                | what the `Update` keeps     | see `optim/stored.py`    |

A sharded optimizer updates a range of the flattened parameter (`piece`); everything here is then about that range.

Micikevicius et al. 2017 (arXiv 1710.03740). Megatron-LM: `Float16OptimizerWithFloat16Params` in
`megatron/core/optimizer/optimizer.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.layers.param import layout_of
from minimegatron.optim.clip import counts_here
from minimegatron.optim.groups import Rates, rates_of


class Shard(Protocol):
    """The part of a parameter that a rank updates (`parallel/data/ddp.Shard`).

    Attributes:
        piece: elements of the flattened parameter; None for all of it.
        grad: where their gradients are.
        data: the weights themselves, in the model's dtype.
    """

    @property
    def piece(self) -> slice | None: ...
    @property
    def grad(self) -> torch.Tensor: ...
    @property
    def data(self) -> torch.Tensor: ...


@dataclasses.dataclass(frozen=True)
class MainParam:
    """A parameter as the optimizer sees it.

    Attributes:
        name: logical name.
        model: what the forward pass reads.
        main: what is updated; an fp32 copy of a 16-bit parameter, else the parameter's own memory. The latter too where
            an `Update` keeps the copy in another form or place (`config.fp32_copies` is off).
        piece: range of the flattened parameter that `main` covers; None for all of it.
        counts_here: whether this rank counts its gradient in the norm.
        rates: of learning and weight decay.
        grad: where the gradient of `main` is; None: the model's `main_grad` or `grad`.
        data: where the weights that `main` covers are; None: in the model.
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
        """Wrap one parameter, or a part of it; `owned`: no other replica updates it."""
        layout, piece = layout_of(model), shard.piece if shard else None
        part = shard.data if shard else model.detach()
        counts = counts_here(layout, mesh, owned or piece is not None)
        given = (shard.grad, shard.data) if shard else (None, None)
        own = cls(name, model, part, piece, counts, rates_of(name, layout, config), *given)
        return own.with_copy() if config.fp32_copies else own

    def with_copy(self) -> MainParam:
        """The same with an fp32 copy as its main parameter, if it has 16 bits."""
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
        """The gradient of `main`, None where the backward pass did not reach the parameter."""
        if self.grad is not None:
            return self.grad
        grad = getattr(self.model, "main_grad", None)
        grad = self.model.grad if grad is None else grad
        return None if grad is None else _part(grad, self.piece)


def _part(x: torch.Tensor, piece: slice | None) -> torch.Tensor:
    """A view of the whole tensor, or of a range of it, flattened."""
    return x if piece is None else x.view(-1)[piece]
