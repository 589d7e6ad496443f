"""The load of the experts: counted, summed over ranks once a step; and the bias that balances it.

Each router has counted its rank's tokens in the backward pass (`layers/moe/router`). At the end of a step the counts of
all layers are summed by one message, and every rank has the whole table:

| message                                                        | axis    | bytes                        |
|----------------------------------------------------------------|---------|------------------------------|
| per layer with experts: E counts, 4 sums; in fp64              | `world` | 8 (E + 4) per such layer     |

(With n balancing losses at once, n + 3 sums.)

Ranks of other stages contribute zeros; tp, cp and dp ranks have different tokens, so the sum counts each once.

**The expert bias** (without an auxiliary loss) is updated after every step by `rate` towards an even load:

    bias_e += rate * sign(mean_e' n_e' - n_e)

It is updated after the checks of a step, as weights are (`move_biases`). n_e counts what the tokens chose, before a
capacity drops any. Megatron-LM counts what is left after that: with padding it is the same for all experts, and the
bias never changes.

Wang et al. 2024 (arXiv 2408.15664). Megatron-LM: `get_updated_expert_bias` in `transformer/moe/moe_utils.py`, called in
`core/distributed/finalize_model_grads.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from minimegatron import trace
from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.config.experts import BALANCING
from minimegatron.layers.moe.router import TopKRouter, set_loss_scale, tally_size
from minimegatron.layers.step_hooks import StepHook, step_hook


@dataclasses.dataclass(frozen=True)
class LayerLoad:
    """The routing of one layer in a step, over all ranks.

    Attributes:
        layer: its global number.
        tokens: how many tokens chose each expert.
        dropped: how many of these choices a capacity refused.
        balancing_loss, z_loss: means over the tokens of the step, coefficients included.
        penalties: each loss under Megatron's name and, as Megatron logs it, without its coefficient: a balancing loss
            is 1 where the load is even.
    """

    layer: int
    tokens: list[int]
    dropped: int
    balancing_loss: float
    z_loss: float
    penalties: dict[str, float] = dataclasses.field(default_factory=dict)


def imbalance(tokens: list[int]) -> float:
    """The load of the busiest expert over the mean load: 1 if it is even, E / k if all tokens choose the same k."""
    return max(tokens) * len(tokens) / max(sum(tokens), 1)


class ExpertLoad:
    """The table of a step, equal on all ranks; it stays on the device until `to_host` reads it.

    Args:
        layers: numbers of the layers with experts.
        table: [layers, ...] as in `TopKRouter.tally`, in fp64, summed over all ranks.
        config: the model, for the coefficients.
    """

    def __init__(self, layers: list[int], table: torch.Tensor, config: TransformerConfig) -> None:
        self._layers, self.table = layers, table
        self._named = [(BALANCING[kind], weight) for kind, weight in config.balancing_losses] or [("", 0.0)]
        self._named.append(("z_loss", config.moe_z_loss_coeff or 0.0))
        self._experts = config.num_experts or 0

    def tokens(self, layer: int) -> torch.Tensor:
        """How many tokens chose each expert of a layer, [E] in fp64."""
        return self.table[self._layers.index(layer), : self._experts]

    def to_host(self) -> list[LayerLoad]:
        """One entry for each layer with experts; waits for the device."""
        return self.rows(self.table.flatten().tolist())

    def rows(self, numbers: Sequence[float]) -> list[LayerLoad]:
        """One entry for each layer, from the numbers of the table in order, which the host has read."""
        loads, width = [], self.table.shape[1]
        for i, layer in enumerate(self._layers):
            row = numbers[i * width : (i + 1) * width]
            counts, (dropped, tokens, *sums) = row[: self._experts], row[self._experts :]
            *balance, z = means = [total / max(tokens, 1.0) for total in sums]
            named = {name: mean / w for (name, w), mean in zip(self._named, means, strict=True) if w}
            loads.append(LayerLoad(layer, [int(n) for n in counts], int(dropped), sum(balance), z, named))
        return loads


@torch.no_grad()
def count_loads(model: nn.Module, mesh: Mesh) -> ExpertLoad | None:
    """Sum the counts of all routers since the last call over ranks.

    Args:
        model: this rank's part of the model, wrapped or not.
        mesh: the layout; all ranks must call it.

    Returns:
        The table, None for a model without experts.
    """
    routers = [m for m in model.modules() if isinstance(m, TopKRouter)]
    config = routers[0].config if routers else getattr(getattr(model, "module", model), "config", None)
    layers = [] if config is None else config.layers_with_experts
    if config is None or not layers:
        return None
    row = {layer: i for i, layer in enumerate(layers)}
    table = torch.zeros(len(layers), tally_size(config), dtype=torch.float64, device=mesh.device)
    for router in routers:
        table[row[router.layer_number]] += router.tally
        router.reset()
    all_reduce(table, mesh.world)
    load = ExpertLoad(layers, table, config)
    if trace.recording():
        _mark(load)
    return load


@torch.no_grad()
def move_biases(model: nn.Module, load: ExpertLoad) -> None:
    """Update the expert biases of a model, wrapped or not, towards an even load."""
    for router in model.modules():
        if isinstance(router, TopKRouter) and router.expert_bias is not None:
            tokens = load.tokens(router.layer_number)
            move = router.config.moe_router_bias_update_rate * (tokens.mean() - tokens).sign()
            router.expert_bias.add_(move.to(router.expert_bias.dtype))


def _mark(load: ExpertLoad) -> None:
    now = time.monotonic()
    for layer in load.to_host():
        note = f"layer {layer.layer}: {' '.join(map(str, layer.tokens))}, {layer.dropped} dropped"
        trace.emit("expert_load", "mark", now, now, note=note)


@step_hook
class Balance(StepHook):
    """The step hook of routers: sets their loss scale; after the passes sums and reports loads, and updates biases.

    Attributes:
        load: the load of the last step whose gradients are finished; None without experts.
    """

    load: ExpertLoad | None = None

    def begin_step(self, scale: float) -> None:
        set_loss_scale(self.model, scale)

    def table(self) -> torch.Tensor | None:
        self.load = count_loads(self.model, self.mesh)
        return None if self.load is None else self.load.table

    def report_fields(self, numbers: list[float]) -> dict[str, Any]:
        assert self.load is not None, "numbers of no table"
        return {"experts": tuple(self.load.rows(numbers))}

    def end_step(self) -> None:
        if self.load is not None:
            move_biases(self.model, self.load)
