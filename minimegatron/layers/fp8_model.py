"""FP8 in a whole model: which layers have it, when their scales move, and weights that are quantised once a step.

In FP8 are the linear layers of attention, MLP and experts. Embedding, output layer, norms, routers and the core of
attention are not, as in Megatron-LM. An expert has its own scales, and multiplies the rows that came to it; where their
number is no multiple of 16 the product over rows, dW, is that of the dequantised factors, on a GPU too.

Delayed scales move at the end of a step (`move_scales`); within it weights stay, and so do their copies in FP8
(`keeping_weights`).

Megatron-LM: `get_fp8_context` in `fp8_utils.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.config import TransformerConfig
from minimegatron.layers.fp8 import DelayedScale, Fp8Recipe
from minimegatron.layers.fp8_linear import ParallelFp8
from minimegatron.layers.moe import Experts
from minimegatron.precision import check_fp8_dims

KINDS = {"delayed": "delayed", "tensorwise": "current", "blockwise": "block", "mxfp8": "mx"}


def recipe_of(config: TransformerConfig) -> Fp8Recipe:
    """What the model's `fp8_...` fields ask for."""
    return Fp8Recipe(
        KINDS[config.fp8_recipe],
        hybrid=config.fp8_format == "hybrid",
        history=config.fp8_amax_history_len,
        algorithm=config.fp8_amax_compute_algo,
        margin=config.fp8_margin,
        kernels=config.kernels,
    )


@runtime_checkable
class TakesFp8(Protocol):
    """A linear layer whose products can be in FP8."""

    weight: nn.Parameter
    fp8: ParallelFp8 | None

    def amax_axes(self, mesh: Mesh) -> dict[str, Axis]:
        """input, weight, gradient -> ranks that hold parts of it."""
        ...


def enable_fp8(module: nn.Module, config: TransformerConfig, mesh: Mesh, where: str = "") -> None:
    """Give every linear layer inside `module` its FP8 products and, with delayed scaling, their state.

    Raises:
        ConfigError: a matrix whose dims on this rank do not suit the recipe.
    """
    agree_over = "tp_cp" if config.tp_only_amax_red else "tp_dp_cp"

    def make(what: str, shape: torch.Size, axes: dict[str, Axis], slot: tuple[int, int] = (0, 1)) -> ParallelFp8:
        check_fp8_dims(config.fp8_recipe, what, outputs=shape[0], inputs=shape[1])
        return ParallelFp8(recipe_of(config), axes, config.fp8_wgrad, agree_over, slot)

    for name, layer in list(module.named_modules()):
        if isinstance(layer, TakesFp8):
            layer.fp8 = make(f"{where}{name}", layer.weight.shape, layer.amax_axes(mesh))
        elif isinstance(layer, Experts):
            pairs = list(zip((layer.weight1.shape[1:], layer.weight2.shape[1:]), layer.amax_axes(), strict=True))
            layer.fp8 = nn.ModuleDict(
                {
                    str(e): nn.ModuleList(make(f"{where}{name}", *pair, (e, layer.number)) for pair in pairs)
                    for e in range(*layer.here)
                }
            )


@torch.no_grad()
def move_scales(model: nn.Module, mesh: Mesh) -> None:
    """End of a step: delayed scales of all layers agree and move on; all ranks of a stage must call.

    One message of 4 bytes a tensor. Ranks have other experts in the same places, so a tensor of an expert has a place
    for every one of the E experts, of which a rank fills its own: those that hold the same expert agree, and no others.
    """
    layers = [m for m in model.modules() if isinstance(m, ParallelFp8) and m.recipe.kind == "delayed"]
    if not layers:
        return
    states = [(s, *layer.slot) for layer in layers for s in layer.modules() if isinstance(s, DelayedScale)]
    places = [state.amax_history.new_zeros(number) for state, _, number in states]
    for place, (state, index, _) in zip(places, states, strict=True):
        place[index] = state.amax_history[0]
    together = all_reduce(torch.cat(places), mesh.axis(layers[0].agree_over), "max")
    for agreed, (state, index, _) in zip(together.split([p.numel() for p in places]), states, strict=True):
        state.amax_history[0] = agreed[index]
        state.update()


@contextlib.contextmanager
def keeping_weights(model: nn.Module) -> Iterator[None]:
    """In the block weights do not move: those that FP8 layers have quantised are kept until its end."""
    layers = [module for module in model.modules() if isinstance(module, ParallelFp8)]
    for layer in layers:
        layer.kept = {}
    try:
        yield
    finally:
        for layer in layers:
            layer.kept = None
