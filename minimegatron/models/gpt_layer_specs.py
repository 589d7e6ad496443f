"""The layer of every decoder family here, as a `ModuleSpec`.

    norm, attention, norm, MLP or experts, each pair with a residual connection (`models/block.py`); with norms of their
    outputs if `layernorm_placement` says so

This file alone knows which parts a configuration asks for; each part refuses by itself what it does not support:

| config                                   | part                                                        |
|------------------------------------------|-------------------------------------------------------------|
| `hybrid_override_pattern`                | layers of one part each, `MambaMixer` among them            |
| `linear_attention_freq`                  | `GatedDeltaNet` in place of attention, in some layers       |
| `multi_latent_attention`                 | `MultiLatentAttention` in place of `SelfAttention`          |
| `num_experts`                            | `MoELayer` in place of `MLP`, in the layers with experts    |
| `encoder_num_layers`                     | the two kinds of layer of `models/encoder_decoder`          |
| `mtp_num_layers`                         | `MultiTokenPrediction` after the last layer                 |
| `vision_num_layers`                      | `VisionLanguageModel` in place of `GPTModel`: see `chunks`  |
| `transformer_impl` transformer_engine    | its linear layers in place of ours                          |
| `fp8_format`                             | built layers are switched to FP8                            |

Megatron-LM: `megatron/core/models/gpt/gpt_layer_specs.py`, `megatron/core/models/mamba/mamba_layer_specs.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from minimegatron.layers.attention.mla import MultiLatentAttention
from minimegatron.layers.attention.self_attention import SelfAttention
from minimegatron.layers.fp8.enable import enable_fp8_layers
from minimegatron.layers.mlp import MLP
from minimegatron.layers.moe.layer import MoELayer
from minimegatron.layers.norm import Norm
from minimegatron.layers.ssm.gated_delta_net import GatedDeltaNet
from minimegatron.layers.ssm.mixer import MambaMixer
from minimegatron.layers.transformer_engine import (
    TEColumnParallelLinear,
    TERowParallelLinear,
    autocast_layers,
    check_transformer_engine,
)
from minimegatron.models.block import TransformerBlock, TransformerLayer
from minimegatron.models.mtp import MultiTokenPrediction
from minimegatron.models.spec import ModuleSpec

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import TransformerConfig
    from minimegatron.config.parallel import ParallelConfig


def decoder_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """The default layer of a model with this config."""
    linears: dict[str, Any] = {}
    if config.transformer_impl == "transformer_engine":
        linears = {"column": TEColumnParallelLinear, "row": TERowParallelLinear}
    attention = MultiLatentAttention if config.multi_latent_attention else SelfAttention
    norms = ["input_layernorm", "pre_mlp_layernorm"] * config.norms_input
    norms += ["post_self_attn_layernorm", "post_mlp_layernorm"] * (config.norms_output or config.norms_sums)
    return ModuleSpec(
        TransformerLayer,
        params={"parts_of": config.parts_of},
        submodules={
            **dict.fromkeys(norms, ModuleSpec(Norm)),
            "self_attention": ModuleSpec(attention, params=linears),
            "gated_delta_net": ModuleSpec(GatedDeltaNet),
            "mamba": ModuleSpec(MambaMixer),
            "mlp": ModuleSpec(MLP, params=linears),
            "moe": ModuleSpec(MoELayer),
        },
    )


def prediction_spec(config: TransformerConfig) -> ModuleSpec | None:
    """The spec of multi-token prediction, if the model has it."""
    return ModuleSpec(MultiTokenPrediction) if config.mtp_num_layers else None


def check_parts(config: TransformerConfig, parallel: ParallelConfig) -> None:
    """Check the parts that depend on installed packages, before anything is built.

    Raises:
        ConfigError: a package is missing, or its layers do not support the configuration.
    """
    check_transformer_engine(config, parallel)


def switch_precision(stage: nn.Module, decoder: TransformerBlock, config: TransformerConfig, mesh: Mesh) -> None:
    """Switch the built layers of a stage to FP8, if the configuration says so.

    Args:
        stage: the stage; its transformer layers are switched.
        decoder: the module that runs most of them.
        config, mesh: the model, its layout.

    Raises:
        ConfigError: the recipe does not allow the size of a matrix.
    """
    if config.fp8_format is not None:
        layers = [module for module in stage.modules() if isinstance(module, TransformerLayer)]
        switch = autocast_layers if config.transformer_impl == "transformer_engine" else enable_fp8_layers
        switch(decoder, layers, config, mesh)
