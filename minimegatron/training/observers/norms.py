"""Norms by layer, and how far a step moves each layer: the first place at which a run goes wrong is one layer.

    gradient    |g_l|               of the whole gradient of layer l, before it is clipped, without the loss scale
    weights     |w_l|               before the step
    update      |dw_l| / |w_l|      of the same step; near 1e-3 in most runs that learn well

A layer is an element of a list of the model (`decoder.layers.3`), with all that is in it; other modules stand for
themselves (`embedding.word_embeddings`). No rank holds a whole layer: each adds the squares of what it alone counts
(`optim/clip.counts_here`), by layer, and one message adds the ranks. So the numbers are those of one process in every
layout, and the squares of all layers add up to the square of the norm in the log.

| message, in a step that is looked at        | axis    | bytes            |
|---------------------------------------------|---------|------------------|
| squares of gradient, weights, update        | `world` | 8 * 3 per layer  |

Such a step costs two passes over gradients and weights more, and a copy of this rank's main parameters in fp32.

`--log-params-norm` adds the norm of all weights to each line of the log, as Megatron-LM does
(`calc_params_l2_norm` in `megatron/training/utils/common_utils.py`); `--log-norms-interval` has no counterpart there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch

from minimegatron.comm.agree import gather_objects
from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TrainingConfig
from minimegatron.optim.main_params import MainParam
from minimegatron.optim.optimizer import MixedPrecisionOptimizer
from minimegatron.training.observers import Observer, Step

GRAD, WEIGHT, UPDATE = range(3)


def layer_of(name: str) -> str:
    """The layer of a parameter's logical name: the first element of a list that it is in, else its own module."""
    in_list = re.match(r".*?\.\d+(?=\.)", name)
    return in_list[0] if in_list else name.rpartition(".")[0] or name


def in_order(layers: set[str]) -> list[str]:
    """Embeddings, layers by number, what follows them."""

    def place(layer: str) -> tuple[int, str, int, str]:
        number = re.search(r"\.(\d+)$", layer)
        kind = 0 if layer.startswith("embedding") else 1 if number else 2
        return kind, layer[: number.start()] if number else "", int(number[1]) if number else 0, layer

    return sorted(layers, key=place)


class Norms(Observer):
    """Measures the norms of every `log_norms_interval`-th step; all ranks measure the same steps.

    Args:
        optimizer: has gradients and weights.
        mesh: the ranks.
        training: the intervals.
        tell: given the norms of a step, before its line of the log is made: `norms`, {layer: [gradient, weights,
            update / weights]}, or `params_norm` alone. A number that is not finite is None.
    """

    def __init__(
        self,
        optimizer: MixedPrecisionOptimizer,
        mesh: Mesh,
        training: TrainingConfig,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self.optimizer, self.mesh, self.training, self.tell = optimizer, mesh, training, tell
        self.layers: list[str] = []
        self._done = 0
        self._seen: tuple[bool, list[MainParam], list[torch.Tensor], torch.Tensor] | None = None

    def begin(self, done: int) -> None:
        if self.training.log_norms_interval or self.training.log_params_norm:
            mine = {layer_of(p.name) for p in self.optimizer.params}
            self.layers = in_order(set().union(*gather_objects(mine, self.mesh.world)))

    def before_step(self, done: int) -> None:
        self._done, self._seen = done, None

    def before_update(self) -> None:
        """Look at gradients and weights, if it is the turn of this step."""
        step, every = self._done + 1, self.training.log_norms_interval
        wholly = every is not None and step % every == 0
        if not (wholly or (self.training.log_params_norm and step % self.training.log_interval == 0)):
            return
        counted = [p for p in self.optimizer.params if p.counts_here and p.main.numel()]
        table = torch.zeros(3, len(self.layers), dtype=torch.float64, device=self.mesh.device)
        weights = self.optimizer.weights(counted)
        self._add(table, WEIGHT, counted, weights)
        weights = [weight.clone() for weight in weights] if wholly else []
        if wholly:
            pairs = [(p, grad) for p in counted if (grad := p.read_grad()) is not None]
            self._add(table, GRAD, [p for p, _ in pairs], [grad for _, grad in pairs])
            table[GRAD] /= self.optimizer.loss_scale**2
        self._seen = wholly, counted, weights, table

    def after_step(self, step: Step) -> None:
        if self._seen is None:
            return
        (wholly, counted, weights, table), self._seen = self._seen, None
        if step.report is None:
            return
        if wholly and counted:
            torch._foreach_sub_(weights, self.optimizer.weights(counted))
            self._add(table, UPDATE, counted, weights)
        squares = all_reduce(table, self.mesh.world).tolist()  # the host waits
        found: dict[str, Any] = {"params_norm": _root(sum(squares[WEIGHT]))}
        if wholly:
            columns = zip(*squares, strict=True)
            found["norms"] = {
                layer: [_root(g), _root(w), _root(u / w) if w > 0 else None]
                for layer, (g, w, u) in zip(self.layers, columns, strict=True)
            }
        self.tell(found)

    def _add(self, table: torch.Tensor, row: int, params: list[MainParam], tensors: list[torch.Tensor]) -> None:
        """Add the squares of each parameter's tensor to its layer."""
        if tensors:
            place = {layer: i for i, layer in enumerate(self.layers)}
            of = torch.tensor([place[layer_of(p.name)] for p in params], device=table.device)
            table[row].index_add_(0, of, self.optimizer.squares(tensors).to(table.device))


def _root(square: float) -> float | None:
    return math.sqrt(square) if math.isfinite(square) else None
