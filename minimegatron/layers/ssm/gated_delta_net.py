"""Gated DeltaNet: in place of attention, a state of fixed size that each token corrects and reads (Qwen3-Next).

The problem in a sentence: of Mamba-2's state (`layers/ssm/mixer`) an entry can only fade; here a token overwrites what
the state says of its key.

    q, k, v, z, b, a = x_in A_in^T                       one column-parallel product
    q, k, v          = silu(causal convolution of each channel with k taps)
    beta             = sigmoid(b)
    g                = -exp(A_log) softplus(a + dt_bias)
    o                = gated delta rule(q, k, v, g, beta)    `layers/ssm/delta_rule`
    out              = (norm(o) * silu(z)) A_out^T       row-parallel; a norm of each head

| tensor              | shape, heads of this rank                                                  |
|---------------------|----------------------------------------------------------------------------|
| q, k                | [s, b, key heads, key width]                                               |
| v, z, o             | [s, b, heads, value width]                                                 |
| a, b, g, beta       | [s, b, heads]                                                              |
| state of a sequence | [heads, key width, value width] in fp32, and the convolution's last inputs |

**Over tp** a rank has whole key heads and the value heads that read them, so no message lies between the two
products; tp must divide the key heads. One gamma serves all heads, and a rank sees its own heads alone: the gradient of
gamma is a partial sum, also without sequence parallelism (`partial="heads"`).

**Over cp** states pass from piece to piece, with a matrix for each piece (`layers/ssm/pieces`). **Documents** begin
with a state of zeros. **In generation** a layer keeps its state and the convolution's last inputs.

Yang, Kautz and Hatamizadeh 2024 (arXiv 2412.06464). Megatron-LM: `megatron/core/ssm/gated_delta_net.py`, which has
neither cp nor generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.config.fields import divides
from minimegatron.layers.inference_context import LayerState, StateSpec
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.param import Init, ParamLayout, cut_evenly, new_parameter
from minimegatron.layers.recompute import recompute_module
from minimegatron.layers.ssm.convolution import CausalConv1d, segments_of
from minimegatron.layers.ssm.delta_rule import DeltaRule, step
from minimegatron.layers.ssm.mixer import initial_A_log
from minimegatron.layers.ssm.pieces import OverPieces, Pieces

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.comm.random import RngStreams
    from minimegatron.config import TransformerConfig
    from minimegatron.layers.attention.self_attention import AttentionContext


class HeadsGatedNorm(nn.Module):
    """RMSNorm of each head, times silu(z); one gamma for all heads.

    Args:
        config: epsilon, dtype, width of a head.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        layout = ParamLayout((config.linear_value_head_dim,), init=Init(value=1.0), partial="heads")
        self.weight = new_parameter(layout, config.dtype)

    def forward(self, o: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """o [s, b, heads / t, v] in fp32, z of the same shape -> [s, b, heads v / t] in the model's dtype."""
        normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + self.eps)
        normed = normed.to(self.weight.dtype) * self.weight
        return (normed * F.silu(z.to(o.dtype))).flatten(2).to(self.weight.dtype)


class GatedDeltaNet(nn.Module):
    """The projections, the convolution, the delta rule and the gated norm; in place of `SelfAttention`.

    Args:
        config: the model.
        mesh: its layout.
        layer_number: global number from 0.
        rng: dropout streams; there is no dropout.

    Raises:
        ConfigError: the key heads cannot be divided over tp.
    """

    supports_context_parallel = True

    def __init__(
        self, config: TransformerConfig, mesh: Mesh, layer_number: int = 0, rng: RngStreams | None = None
    ) -> None:
        super().__init__()
        self.layer_number, self.mesh, tp, dtype = layer_number, mesh, mesh.tp, config.dtype
        groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
        divides(tp.size, groups, "tensor_model_parallel_size", "linear_num_key_heads")
        self.k, self.v = config.linear_key_head_dim, config.linear_value_head_dim
        keys, inner = groups * self.k, heads * self.v
        self.heads = heads // tp.size
        blocks = (keys, keys, inner, inner, heads, heads)  # q, k, v, z, b, a
        self.sizes = [n // tp.size for n in (2 * keys + inner, inner, heads, heads)]
        self.of_qkv = [n // tp.size for n in blocks[:3]]
        how: dict[str, Any] = {"bias": False, "sequence_parallel": mesh.sequence_parallel, "dtype": dtype}
        std, out = Init(std=config.init_method_std), Init(std=config.output_init_std)
        self.in_proj = ColumnParallelLinear(config.hidden_size, sum(blocks), tp, init=std, blocks=blocks, **how)
        self.conv1d = CausalConv1d(blocks[:3], config.linear_conv_kernel_dim, tp, dtype, bias=False)
        parts = cut_evenly(heads, tp, "the heads of a GatedDeltaNet")
        self.A_log, self.dt_bias = (
            new_parameter(ParamLayout((heads,), 0, parts, tp.rank, init), dtype)
            for init in (Init(std=1.0, of=initial_A_log), Init(value=1.0))
        )
        self.rule = OverPieces(DeltaRule, config.linear_chunk_size, mesh)
        if config.recomputes("core_attn"):
            recompute_module(self.rule, rng)
        self.out_norm = HeadsGatedNorm(config)
        self.out_proj = RowParallelLinear(inner, config.hidden_size, tp, init=out, **how)

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """[s, b, h] -> [s, b, h] (both cut over the sequence with sequence parallelism)."""
        assert context.mask.causal, "a recurrence sees the past alone"
        qkv, z, b, a = self.in_proj(x).split(self.sizes, -1)
        g, beta = self._gates(a, b)
        state = context.state_of(self.layer_number)
        if state is None:
            o = self._trained(qkv, g, beta, context.mask.document_ids)
        else:
            o = self._generated(qkv, g, beta, state)
        return self.out_proj(self.out_norm(o, z.unflatten(-1, (self.heads, self.v))))  # type: ignore[no-any-return]

    def inference_state(self) -> dict[str, StateSpec]:
        """The convolution's last inputs, and S."""
        wide, reach = torch.promote_types(self.A_log.dtype, torch.float32), self.conv1d.kernel - 1
        return {
            "conv": StateSpec((reach, self.sizes[0]), "sequence"),
            "ssm": StateSpec((self.heads, self.k, self.v), "sequence", wide),
        }

    def _trained(
        self, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Inputs of the convolution [s, b, channels], g and beta -> o [s, b, heads, v], of this rank's tokens."""
        reach = self.conv1d.kernel - 1
        segments = None if document_ids is None else segments_of(document_ids, reach)
        q, k, v = self._heads(self.conv1d.over(Pieces(len(qkv), self.mesh), qkv, segments))
        before = None if segments is None else segments[:, reach - 1 :]
        return self.rule(before, q, k, v, g, beta)  # type: ignore[no-any-return]

    def _generated(self, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: LayerState) -> torch.Tensor:
        """The same for the new tokens of a step, [n, 1, ...]; the state becomes that after them."""
        qkv, g, beta = (state.padded(t) for t in (qkv, g, beta))  # with g = beta = 0 padding changes no state
        tail, h = state.read_sequences("conv", "ssm")
        convolved, tail = self.conv1d.generated(qkv, tail, state.context.starts.diff())
        q, k, v = self._heads(convolved)
        if len(qkv) == 1:
            o, h = step(q[0], k[0], v[0], g[0], beta[0], h)
            o = o[None]
        else:
            o, h = DeltaRule(q, k, v, g, beta, self.rule.chunk_size).outputs(h)
        state.write_sequences(conv=tail, ssm=h)
        return state.unpadded(o)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[s, b, channels] -> q and k [s, b, key heads, k], v [s, b, heads, v]."""
        q, k, v = qkv.split(self.of_qkv, -1)
        return q.unflatten(-1, (-1, self.k)), k.unflatten(-1, (-1, self.k)), v.unflatten(-1, (-1, self.v))

    def _gates(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """g and beta, [s, b, heads] in fp32."""
        wide = torch.promote_types(a.dtype, torch.float32)
        A = self.A_log.to(wide).exp()
        return -A * F.softplus(a.to(wide) + self.dt_bias.to(wide)), b.to(wide).sigmoid()
