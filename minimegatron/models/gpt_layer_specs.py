"""The layer of every decoder family here, as a `ModuleSpec`.

    norm, attention, norm, MLP or experts, each pair with a residual connection (`models/block.py`); norms of what they
    give where `layernorm_placement` says so

What every decoder has is imported. What only some have is named, and imported when a model that has it is built:

| config                                   | part                                                        |
|------------------------------------------|-------------------------------------------------------------|
| `multi_latent_attention`                 | `MultiLatentAttention` in place of `SelfAttention`          |
| `num_experts`                            | `MoELayer` in place of `MLP`, in the layers with experts    |
| `mtp_num_layers`                         | `MultiTokenPrediction` behind the last layer                |
| `transformer_impl` transformer_engine    | its linear layers in place of ours                          |
| `fp8_format`                             | a function that switches built layers to FP8                |

Megatron-LM: `megatron/core/models/gpt/gpt_layer_specs.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minimegatron.layers.attention import SelfAttention
from minimegatron.layers.mlp import MLP
from minimegatron.layers.norm import Norm
from minimegatron.models.block import TransformerLayer
from minimegatron.models.spec import ModuleSpec
from minimegatron.named import Named, import_module

if TYPE_CHECKING:
    from minimegatron.config import TransformerConfig

MULTI_LATENT_ATTENTION: Named = "minimegatron.layers.mla", "MultiLatentAttention"
MOE: Named = "minimegatron.layers.moe", "MoELayer"
MULTI_TOKEN_PREDICTION: Named = "minimegatron.models.mtp", "MultiTokenPrediction"
_TE = "minimegatron.layers.transformer_engine"
TE_COLUMN: Named = _TE, "TEColumnParallelLinear"
TE_ROW: Named = _TE, "TERowParallelLinear"
TE_CHECK: Named = _TE, "check_transformer_engine"

# transformer_impl -> function (stack of layers, its TransformerLayers, config, mesh) that switches them to FP8
FP8: dict[str, Named] = {
    "local": ("minimegatron.layers.fp8_model", "enable_fp8_layers"),
    "transformer_engine": (_TE, "autocast_layers"),
}


def decoder_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """The default layer of a model with this config."""
    linears: dict[str, Any] = {}
    if config.transformer_impl == "transformer_engine":
        linears = {"column": import_module(TE_COLUMN), "row": import_module(TE_ROW)}
    attention = MULTI_LATENT_ATTENTION if config.multi_latent_attention else SelfAttention
    norms = ["input_layernorm", "pre_mlp_layernorm"] * config.norms_input
    norms += ["post_self_attn_layernorm", "post_mlp_layernorm"] * config.norms_output
    return ModuleSpec(
        TransformerLayer,
        submodules={
            **dict.fromkeys(norms, ModuleSpec(Norm)),
            "self_attention": ModuleSpec(attention, params=linears),
            "mlp": ModuleSpec(MLP, params=linears),
            "moe": ModuleSpec(MOE),
        },
    )
