"""FP8 in a model: which layers have it, and what is done once a step.

The linear layers of attention, MLP and experts compute in FP8 (`layers/fp8/linear`). Embedding, output layer, norms,
routers and the core of attention do not, as in Megatron-LM. An expert has its own scales, for the rows that are sent to
it.

| when                  | what                                                                     | by                |
|-----------------------|--------------------------------------------------------------------------|-------------------|
| the model is built    | each of these layers gets a `ParallelFp8`, by the `fp8_...` fields       | `enable_fp8`      |
| during the passes     | a weight that the first microbatch has quantised is kept for the others  | `keeping_weights` |
| after the update      | delayed scales agree over the ranks and move, in one message             | `move_scales`     |

The last two are a step hook (`Fp8Step`), so the training step does not know FP8.

Megatron-LM: `get_fp8_context` in `fp8_utils.py`. Transformer Engine: `FP8GlobalStateManager`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.config.model import TransformerConfig
from minimegatron.config.variants import check_fp8_dims
from minimegatron.layers.fp8.linear import TENSORS, ParallelFp8
from minimegatron.layers.fp8.matmul import Fp8Recipe
from minimegatron.layers.fp8.scaling import DelayedScale, Siblings, together
from minimegatron.layers.moe.layer import Experts
from minimegatron.layers.step_hooks import StepHook, step_hook

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh

KINDS = {"delayed": "delayed", "tensorwise": "current", "blockwise": "block", "mxfp8": "mx"}


def recipe_of(config: TransformerConfig) -> Fp8Recipe:
    """The recipe of the model's `fp8_...` fields."""
    return Fp8Recipe(
        KINDS[config.fp8_recipe],
        hybrid=config.fp8_format == "hybrid",
        history=config.fp8_amax_history_len,
        algorithm=config.fp8_amax_compute_algo,
        margin=config.fp8_margin,
        kernels=config.kernels,
    )


def enable_fp8(module: nn.Module, config: TransformerConfig, mesh: Mesh, where: str = "") -> None:
    """Give every linear layer inside `module` its FP8 products and, with delayed scaling, their state.

    Raises:
        ConfigError: the recipe does not allow the size of a matrix on this rank.
    """
    agree_over = "tp_cp" if config.tp_only_amax_red else "tp_dp_cp"

    def make(what: str, shape: torch.Size, axes: dict[str, Axis], **place: Any) -> ParallelFp8:
        check_fp8_dims(config.fp8_recipe, what, outputs=shape[0], inputs=shape[1])
        return ParallelFp8(recipe_of(config), axes, config.fp8_wgrad, agree_over, **place)

    for name, layer in list(module.named_modules()):
        if isinstance(layer, Experts):
            both = [
                (weight.shape[1:], axes, {which: Siblings(layer.number) for which in TENSORS})
                for weight, axes in zip((layer.weight1, layer.weight2), layer.amax_axes(), strict=True)
            ]
            layer.fp8 = nn.ModuleDict(
                {
                    str(e): nn.ModuleList(
                        make(f"{where}{name}", shape, axes, siblings=siblings, index=e)
                        for shape, axes, siblings in both
                    )
                    for e in range(*layer.here)
                }
            )
        elif hasattr(layer, "amax_axes"):  # a linear layer
            layer.fp8 = make(f"{where}{name}", layer.weight.shape, layer.amax_axes(mesh))


def enable_fp8_layers(stack: nn.Module, layers: Iterable[Any], config: TransformerConfig, mesh: Mesh) -> None:
    """`enable_fp8` for those layers of a stage that `config.fp8_layer` selects.

    Args:
        stack: the module that runs the layers; Transformer Engine's twin of this function needs it, this one does not.
        layers: its `TransformerLayer`s.
        config, mesh: the model, its layout.

    Raises:
        ConfigError: as `enable_fp8`.
    """
    for layer in layers:
        if config.fp8_layer(layer.layer_number):
            enable_fp8(layer, config, mesh, f"layers.{layer.layer_number}.")


def move_scales(model: nn.Module, mesh: Mesh) -> None:
    """End of a step: delayed scales of all layers agree and are updated; all ranks of a stage must call it.

    One message of 4 bytes a tensor; for an expert's tensor 4 bytes for every expert of its layer.
    """
    states = _delayed(model)
    if states:
        over = {layer.agree_over for layer in _layers(model)}
        assert len(over) == 1, f"scales that agree over {over} at once"
        together(states).move(mesh.axis(over.pop()))


def _layers(model: nn.Module) -> list[ParallelFp8]:
    return [module for module in model.modules() if isinstance(module, ParallelFp8)]


def _delayed(model: nn.Module) -> list[DelayedScale]:
    return [module for module in model.modules() if isinstance(module, DelayedScale)]


@contextlib.contextmanager
def keeping_weights(model: nn.Module) -> Iterator[None]:
    """In the block, the passes of a step, weights that FP8 layers have quantised are kept.

    Scales are placed in their common tensor here, before a CUDA graph is recorded that reads them.
    """
    layers, states = _layers(model), _delayed(model)
    if states:
        together(states)
    for layer in layers:
        layer.kept = {}
    try:
        yield
    finally:
        for layer in layers:
            layer.kept = None


@step_hook
class Fp8Step(StepHook):
    """The step hook of FP8 layers: quantised weights are kept during the passes, scales are updated at the end."""

    def during_passes(self) -> contextlib.AbstractContextManager[None]:
        return keeping_weights(self.model)

    def end_step(self) -> None:
        move_scales(self.model, self.mesh)
