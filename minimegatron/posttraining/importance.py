"""What each part of a model gives to the rest on a text: the scores by which `posttraining/prune` chooses.

The text is read once by the whole model, in one process and in fp32, and every unit gets a score:

| unit                                          | score, over the tokens of the text                                   |
|-----------------------------------------------|----------------------------------------------------------------------|
| query head, in each layer                     | norm of its output, as `linear_proj` reads it                        |
| neuron of an MLP, in each layer               | norm of its activation, as `linear_fc2` reads it                     |
| channel of the residual stream, in all layers | norm of what a layer norm gives for it, summed over the layer norms  |
| layer                                         | block influence, 1 - mean cos(x, y) of its input x and its output y; |
|                                               | or the loss of the text without it (`drop_by_loss`)                  |

A unit whose activation is 0 has the score 0.

Muralidharan et al. 2024 (Minitron, arXiv 2407.14679), section 2.2; Men et al. 2024 (ShortGPT, block influence,
arXiv 2403.03853).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.layers.norm import Norm


@dataclasses.dataclass
class Scores:
    """The scores of all units, larger for those that do more; by the number of the layer where each layer has its own.

    Attributes:
        heads: [a] of each layer.
        ffn: [f] of each layer with an MLP.
        hidden: [h].
        shares: name of a norm -> e, [h].
        influence: of each layer.
    """

    heads: dict[int, torch.Tensor]
    ffn: dict[int, torch.Tensor]
    hidden: torch.Tensor
    shares: dict[str, torch.Tensor]
    influence: dict[int, float]


class _Mean:
    """A mean over all tokens seen, in fp64."""

    def __init__(self) -> None:
        self.total, self.tokens = torch.zeros(()), 0

    def see(self, values: torch.Tensor) -> None:
        """Values [s, b, ...]."""
        flat = values.double().flatten(0, 1)
        self.total, self.tokens = self.total + flat.sum(0), self.tokens + len(flat)

    def value(self) -> torch.Tensor:
        return self.total / self.tokens


@torch.no_grad()
def measure(model: Any, tokens: torch.Tensor) -> Scores:
    """The scores of a model's units on a text.

    Args:
        model: the whole model on one rank, in eval mode.
        tokens: [n, s], the calibration text.
    """
    means: dict[tuple[str, Any], _Mean] = {}
    handles = []

    def watch(module: nn.Module, see: Callable[..., None], *where: Any) -> None:
        handles.append(module.register_forward_hook(lambda _, args, output: see(*where, args, output)))

    def mean(kind: str, where: Any) -> _Mean:
        return means.setdefault((kind, where), _Mean())

    def see_norm(name: str, args: tuple[torch.Tensor, ...], output: Any) -> None:
        x = torch.stack([each.double() for each in args]).sum(0)  # of x and a residual
        mean("share", name).see(x.square() / x.square().mean(-1, keepdim=True).clamp(min=1e-300))
        mean("norm", name).see((output[0] if isinstance(output, tuple) else output).double().square())

    def see_layer(number: int, args: tuple[Any, ...], output: torch.Tensor) -> None:
        mean("layer", number).see(1 - F.cosine_similarity(args[0].double(), output.double(), dim=-1))

    def see_heads(number: int, args: tuple[Any, ...], output: torch.Tensor) -> None:
        squares = args[0].double().square()
        mean("heads", number).see(squares.unflatten(-1, (-1, model.config.kv_channels)).sum(-1))

    def see_ffn(number: int, args: tuple[Any, ...], output: torch.Tensor) -> None:
        mean("ffn", number).see(args[0].double().square())

    for number, layer in model.layers.items():
        watch(layer, see_layer, number)
        if not model.config.multi_latent_attention:
            watch(layer.self_attention.linear_proj, see_heads, number)
        if hasattr(layer.mlp, "linear_fc2"):
            watch(layer.mlp.linear_fc2, see_ffn, number)
    for name, module in model.named_modules():
        if isinstance(module, Norm) and ".self_attention." not in name:
            watch(module, see_norm, name)
    try:
        for row in tokens:
            model(row[None].to(model.mesh.device))
    finally:
        for handle in handles:
            handle.remove()
    of = {kind: {where: each.value() for (k, where), each in means.items() if k == kind}
          for kind in ("heads", "ffn", "norm", "share", "layer")}  # fmt: skip
    return Scores(
        {number: x.sqrt() for number, x in of["heads"].items()},
        {number: x.sqrt() for number, x in of["ffn"].items()},
        torch.stack([x.sqrt() for x in of["norm"].values()]).sum(0),
        of["share"],
        {number: x.item() for number, x in of["layer"].items()},
    )


def drop_by_influence(scores: Scores, count: int) -> list[int]:
    """The numbers of the `count` layers with the least block influence."""
    return sorted(sorted(scores.influence, key=lambda number: scores.influence[number])[:count])


def drop_by_loss(model: Any, count: int, loss: Callable[[], float]) -> list[int]:
    """The numbers of `count` layers, one after the other the one without which the loss is least.

    Args:
        model: the whole model on one rank, in eval mode; unchanged afterwards.
        count: how many.
        loss: of the model as it is; called for every layer that is left, `count` times.
    """
    dropped: list[int] = []
    for _ in range(count):
        left = [number for number in model.layers if number not in dropped]
        losses = {}
        for number in left:
            with _without(model, [*dropped, number]):
                losses[number] = loss()
        dropped.append(min(left, key=lambda number: losses[number]))
    return sorted(dropped)


@contextlib.contextmanager
def _without(model: Any, numbers: Sequence[int]) -> Iterator[None]:
    """Inside, the model skips some layers."""
    layers = model.decoder.layers
    model.decoder.layers = nn.ModuleDict({name: layer for name, layer in layers.items() if int(name) not in numbers})
    try:
        yield
    finally:
        model.decoder.layers = layers
