"""A linear attention whose memory fades as its tokens say, in place of softmax attention.

    S_i = g_i S_{i-1} + k_i v_i^T,   y_i = norm(q_i S_i / sqrt(d))           one token after the other
    y_i = norm(sum_{j <= i} exp(c_i - c_j) (q_i . k_j) v_j / sqrt(d))        all of them at once

g_i in (0, 1) is a number of each head, computed from token i, and c_i the sum of log g up to i. Yang et al. 2023
(arXiv 2312.06635) with a gate for each head, as in Mamba-2 (2405.21060). Heads are divided over tp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.inference_context import LayerState, StateSpec
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.param import Init, ParamLayout, cut_evenly, new_parameter
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec


class GatedLinearAttention(nn.Module):
    """[s, b, h] -> [s, b, h]; it keeps S of each sequence, [a, d, d]."""

    def __init__(self, config: TransformerConfig, mesh: Mesh, layer_number: int = 0, rng: Any = None) -> None:
        super().__init__()
        heads, self.d, self.epsilon = config.num_attention_heads, config.kv_channels, config.layernorm_epsilon
        parts = cut_evenly(heads, mesh.tp, "the heads of GatedLinearAttention")
        self.layer_number, self.heads = layer_number, heads // mesh.tp.size
        how: dict[str, Any] = {"sequence_parallel": mesh.sequence_parallel, "dtype": config.dtype}
        std, last = Init(std=config.init_method_std), Init(std=config.output_init_std)
        # q, k, v and the gate of a head, then those of the next
        self.input = ColumnParallelLinear(config.hidden_size, heads * (3 * self.d + 1), mesh.tp, init=std, **how)
        self.output = RowParallelLinear(heads * self.d, config.hidden_size, mesh.tp, init=last, **how)
        own = ParamLayout((heads,), 0, parts, mesh.tp.rank, Init(value=1.0))
        self.norm = new_parameter(own, config.dtype)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x [s, b, h], or [s/t, b, h] with sequence parallelism."""
        packed, state = self.input(x), context.state_of(self.layer_number)
        if state is not None:
            packed = state.padded(packed)  # sequences side by side
        packed = packed.unflatten(-1, (self.heads, 3 * self.d + 1)).permute(1, 2, 0, 3)  # [b, a, s, ...]
        q, k, v, gate = packed.split([self.d, self.d, self.d, 1], -1)
        q, faded = q / math.sqrt(self.d), F.logsigmoid(gate[..., 0] + 3.0).cumsum(-1)  # c, [b, a, s]
        place = torch.arange(q.shape[2], device=x.device)
        seen = place[:, None] >= place
        if (ids := context.mask.document_ids) is not None:
            seen = seen & (ids[:, None, :, None] == ids[:, None, None])
        weights = (faded[..., None] - faded[..., None, :]).masked_fill(~seen, -math.inf).exp()
        y = (q @ k.transpose(2, 3) * weights) @ v
        if state is not None:
            y = y + self.go_on(q, k, v, faded, place, state)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.epsilon) * self.norm[:, None, None]
        y = y.permute(2, 0, 1, 3).flatten(2)
        return self.output(y if state is None else state.unpadded(y))

    def inference_state(self) -> dict[str, StateSpec]:
        """S."""
        return {"memory": StateSpec((self.heads, self.d, self.d), "sequence")}

    def go_on(self, q: Tensor, k: Tensor, v: Tensor, faded: Tensor, place: Tensor, state: LayerState) -> Tensor:
        """What new tokens see of those before; S becomes that behind each sequence's own last token."""
        (before,) = state.read_sequences("memory")
        own = state.context.starts.diff()[:, None, None]  # new tokens of each sequence; the others are padding
        end = F.pad(faded, (1, 0)).gather(-1, own.expand(-1, self.heads, 1).long())  # c behind the last own one
        kept = (end - faded).masked_fill(place >= own, -math.inf).exp()
        state.write_sequences(memory=before * end.exp()[..., None] + (k * kept[..., None]).transpose(2, 3) @ v)
        return (q @ before) * faded.exp()[..., None]


def layers(config: TransformerConfig) -> ModuleSpec:
    """The model's own layers with this mixer."""
    return decoder_layer_spec(config).with_submodule("self_attention", ModuleSpec(GatedLinearAttention))
