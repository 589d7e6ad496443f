"""A transformer layer, and the stack of them that one pipeline stage holds.

    x = x + dropout(attention(norm(x)))
    x = x + dropout(mlp(norm(x)))

A layer of a hybrid model is one of the two lines alone, whose mixer may be another than attention (`config/hybrid`).
`layernorm_placement` may put norms after attention and MLP: norm(attention(norm(x))) and norm(mlp(norm(x))) (Gemma 2),
or norm(attention(x)) and norm(mlp(x)) (OLMo 2). With the placement `residual` (BERT) the sums themselves are normed,
x = norm(x + dropout(attention(x))), and in place of a norm after the last layer there is one before the first.

The parts of a layer are built from specs: a `ModuleSpec` (`models/spec`) names a class and fixed arguments, and
`build_module(spec, ...)` calls the class with both.

Layers are named by their *global* number: stage 1 of 2 in a 4-layer model holds `layers.2` and `layers.3`. So a
parameter has the same name in every layout, and seeds, checkpoints and converters need no translation.

Megatron-LM: `megatron/core/transformer/transformer_layer.py`, `transformer_block.py`; for hybrids
`megatron/core/ssm/mamba_block.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from minimegatron.errors import ConfigError
from minimegatron.layers.dropout import Dropout
from minimegatron.layers.inference_context import StateSpec, inference_state_of
from minimegatron.layers.norm import Norm, add_norm
from minimegatron.layers.recompute import recompute, recompute_module
from minimegatron.models.spec import ModuleSpec, build_module

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.comm.random import RngStreams
    from minimegatron.config import TransformerConfig
    from minimegatron.layers.attention.self_attention import AttentionContext


MIXERS, MLPS = ("self_attention", "gated_delta_net", "mamba"), ("mlp", "moe")


class TransformerLayer(nn.Module):
    """Residual layer built from its submodules' specs.

    Args:
        config: the model.
        mesh: its layout.
        layer_number: global number, from 0.
        rng: dropout streams.
        submodules: specs of `input_layernorm`, `MIXERS`, `post_self_attn_layernorm`, `pre_mlp_layernorm`, `MLPS`,
            `post_mlp_layernorm`; a norm without a spec is left out.
        parts_of: number of a layer -> names of its parts: one of `MIXERS`, one of `MLPS`, or one of each. Whichever
            they are, the mixer is the attribute `self_attention`, and the MLP is `mlp`.

    Raises:
        ConfigError: the attention module does not fit the layout, or cp > 1 and it does not declare
            `supports_context_parallel`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        layer_number: int = 0,
        rng: RngStreams | None = None,
        *,
        submodules: dict[str, ModuleSpec],
        parts_of: Callable[[int], Sequence[str]] = lambda layer_number: ("self_attention", "mlp"),
    ) -> None:
        super().__init__()
        self.layer_number = layer_number

        parts = parts_of(layer_number)
        mixer, mlp = (next((part for part in of if part in parts), None) for of in (MIXERS, MLPS))

        def norm(name: str, of: str | None) -> nn.Module:
            return build_module(submodules[name], config) if of and name in submodules else nn.Identity()

        self.input_layernorm = norm("input_layernorm", mixer)
        self.self_attention = build_module(submodules[mixer], config, mesh, layer_number, rng) if mixer else None
        self.post_self_attn_layernorm = norm("post_self_attn_layernorm", mixer)
        self.pre_mlp_layernorm = norm("pre_mlp_layernorm", mlp)
        if mixer and mesh.cp.size > 1 and not getattr(self.self_attention, "supports_context_parallel", False):
            raise ConfigError(
                f"layer {layer_number} has a {type(self.self_attention).__name__}, which does not say that it can "
                "share a sequence over cp",
                fix="context_parallel_size = 1, or supports_context_parallel = True in its class if it can",
            )
        numbered = (layer_number, rng) if mlp == "moe" else ()  # a router is named in messages, and draws
        self.mlp = build_module(submodules[mlp], config, mesh, *numbered) if mlp else None
        self.norms_sums = config.norms_sums
        self.post_mlp_layernorm = norm("post_mlp_layernorm", mlp)
        self.dropout = Dropout(config.hidden_dropout, rng, different_over_tp=mesh.sequence_parallel)
        if config.recomputes("layernorm"):
            for module in (self.input_layernorm, self.pre_mlp_layernorm):
                recompute_module(module, rng)
        if self.mlp is not None and config.recomputes(str(mlp)):
            recompute_module(self.mlp, rng)

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """[s, b, h] -> [s, b, h] (both cut over the sequence with sequence parallelism)."""
        if self.norms_sums:
            assert self.self_attention is not None and self.mlp is not None, "no layer of a hybrid norms its sums"
            x, _ = add_norm(self.post_self_attn_layernorm, x, self.dropout(self.self_attention(x, context)))
            return add_norm(self.post_mlp_layernorm, x, self.dropout(self.mlp(x)))[0]
        if self.self_attention is None:
            normed = self.pre_mlp_layernorm(x)
        elif self.mlp is None:
            return x + self._attended(x, context)
        else:  # x = x + dropout(attention(norm(x))), fused with the norm that follows
            normed, x = add_norm(self.pre_mlp_layernorm, x, self._attended(x, context))
        assert self.mlp is not None, "a layer has a mixer or an MLP"
        return x + self.dropout(self.post_mlp_layernorm(self.mlp(normed)))

    def _attended(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """dropout(attention(norm(x))), [s, b, h]."""
        assert self.self_attention is not None, "asked of a layer with a mixer"
        return self.dropout(self.post_self_attn_layernorm(self.self_attention(self.input_layernorm(x), context)))

    def inference_state(self) -> dict[str, StateSpec]:
        """The state that the layer keeps of earlier tokens in generation; see `layers/inference_context`."""
        if self.self_attention is None:
            return {}
        return inference_state_of(self.self_attention, f"self_attention of layer {self.layer_number}")


class TransformerBlock(nn.Module):
    """The layers `layer_numbers` of the model, and after the last of them the final norm.

    Args:
        config: the model.
        mesh: its layout.
        spec: the spec of each layer.
        layer_numbers: global numbers of the layers of this stage.
        final_layernorm: whether this stage has the final norm (the last stage), if the model has one.
        rng: dropout streams.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        spec: ModuleSpec,
        layer_numbers: Sequence[int],
        final_layernorm: bool = True,
        rng: RngStreams | None = None,
    ) -> None:
        super().__init__()
        self.config, self.rng = config, rng
        self.layers = nn.ModuleDict({str(n): build_module(spec, config, mesh, n, rng) for n in layer_numbers})
        self.final_layernorm = Norm(config) if final_layernorm and not config.norms_sums else None

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """[s, b, h] -> [s, b, h]."""
        layers = list(self.layers.values())
        for group, again in self.groups(layers):
            x = recompute(_run, group, x, context, rng=self.rng) if again else _run(group, x, context)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def groups(self, layers: list[nn.Module]) -> list[tuple[list[nn.Module], bool]]:
        """(Group of layers, whether it is recomputed as a whole), in the order in which they run."""
        if self.config.recompute_granularity != "full" or not self.training:
            return [(layers, False)]
        n = self.config.recompute_num_layers
        if self.config.recompute_method == "uniform":
            return [(layers[i : i + n], True) for i in range(0, len(layers), n)]
        return [([layer], True) for layer in layers[:n]] + [(layers[n:], False)]


def _run(layers: list[nn.Module], x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
    for layer in layers:
        x = layer(x, context)
    return x
