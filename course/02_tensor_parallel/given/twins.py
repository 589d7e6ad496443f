"""A model cut over tp beside the same model in one process: its gradients put together, and where they depart.

    serial = gradients(twin)                      # one process: as they are
    yours = gradients(model, mesh)                # gathered over tp: the logical gradients, on every rank
    departing(yours, serial)                      # names of those that are not the same
    norm(yours), norm(serial)                     # one number that most mistakes change

`train` returns the loss of every step. `shake` gives a new model weights as after some training, because at the start
biases are 0 and norms 1, and a mistake in either cannot be seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from minimegatron.comm.collectives import all_gather
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.logical import draw, gather_logical
from minimegatron.layers.param import Init, layout_of

Gradients = dict[str, torch.Tensor]
Model = TypeVar("Model", bound=nn.Module)


def gradients(model: nn.Module, mesh: Mesh | None = None) -> Gradients:
    """{parameter: its logical gradient}; on a mesh every rank of tp calls this, and gets all of them."""
    found = {name: (p.grad, layout_of(p)) for name, p in model.named_parameters() if p.grad is not None}
    return {n: g if mesh is None else gather_logical(g, layout, mesh.tp) for n, (g, layout) in found.items()}


def norm(grads: Mapping[str, torch.Tensor]) -> float:
    """The norm of all gradients together."""
    return torch.stack([g.norm() for g in grads.values()]).norm().item()


def departing(grads: Mapping[str, torch.Tensor], serial: Mapping[str, torch.Tensor], share: float = 1e-3) -> list[str]:
    """Parameters whose gradient is off by more than this share of its largest number, or is missing."""
    return [
        name
        for name, want in serial.items()
        if name not in grads or not bool((grads[name] - want).abs().max() <= share * want.abs().max() + 1e-7)
    ]


def replicas_agree(model: nn.Module) -> bool:
    """Whether the parameters that every rank holds whole have the same gradient, to the last bit, on all ranks."""
    copies = [p.grad.flatten() for p in model.parameters() if p.grad is not None and not layout_of(p).sharded]
    mine = torch.cat(copies)
    each = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(each, mine)
    return all(torch.equal(mine, other) for other in each)


def shards_of(parameter: torch.Tensor, mesh: Mesh, of: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Every rank's `of(parameter)`, the parameter itself or its gradient."""
    return list(all_gather(of(parameter).detach()[None], mesh.tp))


def equal_shards(model: nn.Module, mesh: Mesh, of: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """`9 of 9`: for how many of the cut matrices all ranks hold the same numbers."""
    cut = [p for p in model.parameters() if p.dim() == 2 and layout_of(p).sharded]
    held = [shards_of(p, mesh, of) for p in cut]
    return f"{sum(all(torch.equal(each[0], other) for other in each) for each in held)} of {len(held)}"


def train(
    model: nn.Module, loss_of: Callable[[int], torch.Tensor], steps: int, learning_rate: float = 3e-3
) -> list[float]:
    """The loss of each step, `loss_of(step)`; AdamW changes the model."""
    optimizer, curve = torch.optim.AdamW(model.parameters(), lr=learning_rate), []
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


@torch.no_grad()
def shake(model: Model, std: float = 0.1, seed: int = 2) -> Model:
    """The same model with noise on every weight, the same logical noise however it is cut."""
    for name, p in model.named_parameters():
        layout = layout_of(p)
        p.add_(layout.take(draw(name, dataclasses.replace(layout, init=Init(std=std)), seed)))
    return model
