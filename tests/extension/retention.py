"""A mixer and a model that the package has never heard of.

The mixer is a linear attention whose past fades, with a state per sequence:

    y_i = sum_{j <= i} g^(i - j) (q_i . k_j) v_j / sqrt(d)           training: all tokens at once
    S_i = g S_{i-1} + k_i^T v_i,   y_i = q_i S_i / sqrt(d)           generation: one token after the other

g is a number of each head in (0, 1), and learned. Named by `--spec tests.extension.retention layers`; `asking` names a
variant that reads its tensors on the host. Sun et al. 2023 (arXiv 2307.08621), without its norm and gate.

The model adds the tokens' embeddings to the last hidden state, so two tensors travel between its stages. Named by
`--spec tests.extension.retention skipping`, in place of `GPTModel`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimegatron.comm.collectives import copy_to_region, reduce_from_region
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.sequence import positions
from minimegatron.config import TransformerConfig
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.inference_context import LayerState, StateSpec
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.param import Init, ParamLayout, cut_evenly, new_parameter
from minimegatron.models.decoder import GPTModel
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec


class Retention(nn.Module):
    """In place of `SelfAttention`; the heads are divided over tp. It does not say that it can share a sequence (cp)."""

    def __init__(self, config: TransformerConfig, mesh: Mesh, layer_number: int = 0, rng: Any = None) -> None:
        super().__init__()
        self.layer_number, self.d, self.tp = layer_number, config.kv_channels, mesh.tp
        heads, h = config.num_attention_heads, config.hidden_size
        how: dict[str, Any] = {"sequence_parallel": mesh.sequence_parallel, "bias": False, "dtype": config.dtype}
        std, out = Init(std=config.init_method_std), Init(std=config.output_init_std)
        self.qkv = ColumnParallelLinear(h, 3 * heads * self.d, mesh.tp, init=std, **how)  # q, k, v of a head, the next
        self.proj = RowParallelLinear(heads * self.d, h, mesh.tp, init=out, **how)
        parts = cut_evenly(heads, mesh.tp, "the decays of Retention")
        self.decay = new_parameter(ParamLayout((heads,), 0, parts, mesh.tp.rank, Init(std=0.5)), config.dtype)
        self.heads = heads // mesh.tp.size

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        packed, state = self.qkv(x), context.state_of(self.layer_number)
        if state is not None:
            packed = state.padded(packed)  # sequences side by side
        q, k, v = packed.unflatten(-1, (self.heads, 3, self.d)).permute(3, 1, 2, 0, 4)  # [b, a', s, d] each
        q, fade = q / math.sqrt(self.d), F.logsigmoid(self.decay + 2.0)  # log g of each head
        place = torch.arange(q.shape[2], device=x.device)
        distance = place[:, None] - place
        weights = (fade[:, None, None] * distance.clamp(min=0)).exp() * (distance >= 0)
        if (ids := context.mask.document_ids) is not None:
            weights = weights * (ids[:, None, :, None] == ids[:, None, None])
        y = (q @ k.transpose(2, 3) * weights) @ v
        if state is not None:
            y = y + self.go_on(q, k, v, fade, place, state)
        y = y.permute(2, 0, 1, 3).flatten(2)
        return self.proj(y if state is None else state.unpadded(y))

    def inference_state(self) -> dict[str, StateSpec]:
        """S."""
        return {"sum": StateSpec((self.heads, self.d, self.d), "sequence")}

    def go_on(self, q: Tensor, k: Tensor, v: Tensor, fade: Tensor, place: Tensor, state: LayerState) -> Tensor:
        """What the new tokens see of those before; the state becomes that after each sequence's own last token."""
        (before,) = state.read_sequences("sum")
        seen = q @ before * (fade[:, None] * (place + 1)).exp()[..., None]
        own = state.context.starts.diff()
        behind = (own[:, None] - 1 - place)[:, None]  # [b, 1, s]: own tokens that follow; below 0 it is padding
        kept = (fade[:, None] * behind.clamp(min=0)).exp() * (behind >= 0)
        faded = before * (fade * own[:, None]).exp()[..., None, None]
        state.write_sequences(sum=faded + (k * kept[..., None]).transpose(2, 3) @ v)
        return seen


def layers(config: TransformerConfig) -> ModuleSpec:
    """The model's own layers with this mixer."""
    return decoder_layer_spec(config).with_submodule("self_attention", ModuleSpec(Retention))


class Gathering(Retention):
    """Scales by a sum over the ranks of tp, in messages of its own, forward and backward."""

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        y = super().forward(x, context)
        return y * (1 + reduce_from_region(copy_to_region(y.mean(-1, keepdim=True), self.tp), self.tp))


def gathering(config: TransformerConfig) -> ModuleSpec:
    """The same, with two messages more."""
    return decoder_layer_spec(config).with_submodule("self_attention", ModuleSpec(Gathering))


class Asking(Retention):
    """Scales by a number that the host reads; it inherits a state, and does not say that it is still its own."""

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        return super().forward(x, context) * x.abs().max().item()


def asking(config: TransformerConfig) -> ModuleSpec:
    """The same, reading."""
    return decoder_layer_spec(config).with_submodule("self_attention", ModuleSpec(Asking))


class Skipping(GPTModel):
    """Logits of the last hidden state plus the embeddings."""

    def stage_specs(self, b: int, s: int, compute_dtype: torch.dtype | None = None) -> Any:
        """{"hidden", "memory"}."""
        ends = super().stage_specs(b, s, compute_dtype)
        return tuple({**end, "memory": end["hidden"]} if end else {} for end in ends)

    def forward(self, tokens: Tensor, position_ids: Any = None, labels: Any = None, **options: Any) -> Any:
        """Losses [b, s], or what the next stage takes."""
        inputs = options.get("inputs") or self._inputs
        self._inputs = None
        places = positions(tokens.shape[1], self.mesh, tokens.device).expand(tokens.shape)
        hidden = self._first_hidden(tokens, places, inputs)
        memory = hidden if self.pre_process else inputs["memory"]
        mask = AttentionMask(document_ids=options.get("document_ids"))
        rotary = None if self.rotary is None else self.rotary(places)
        hidden = self.decoder(hidden, AttentionContext(rotary, mask, None))
        return self._losses(hidden + memory, labels) if self.post_process else {"hidden": hidden, "memory": memory}


def skipping(config: TransformerConfig) -> ModuleSpec:
    """A stage of it, with the mixer above."""
    return ModuleSpec(Skipping, params={"spec": layers(config)})
