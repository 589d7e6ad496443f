"""Multi-latent attention: keys and values of all heads are projections of one short vector a token.

The problem in a sentence: the KV cache of generation holds 2 g d numbers for every token and layer, and with 128 heads
that is more than the model itself.

Cache a latent c of r numbers in place of keys and values, and one key of d_r numbers, shared by all heads, to which
RoPE is applied:

    c_kv   = norm(x W_dkv^T)                     [s, b, r]           k_r = rope(x W_kr^T)    [s, b, d_r]
    k_i    = [c_kv W_uk,i^T ; k_r]               d_n + d_r           v_i = c_kv W_uv,i^T     d_v
    q_i    = [c_q W_uq,i^T ; rope(c_q W_qr,i^T)]                     c_q = norm(x W_dq^T), or x itself
    o      = concat_i softmax(q_i k_i^T / sqrt(d_n + d_r)) v_i       y = o W_o^T

RoPE is not applied to keys that are made from c, so W_uk can move to the other side of the dot product, (c W_uk^T) . q
= c . (q W_uk), and W_uv after the sum over tokens. So generation computes no keys or values: the score is q W_uk [r]
times c itself, and W_uv is applied to the sum of latents [r] at the end (`absorbed`). This is attention with one
key/value head of width r + d_r, which needs the memory of the latent:

| kept for a token and layer   | numbers             | DeepSeek-V3 (128 heads, d_n + d_r = 192, d_v = 128, r = 512) |
|------------------------------|---------------------|--------------------------------------------------------------|
| keys and values of all heads | a (d_n + d_r + d_v) | 40,960                                                       |
| latent and key after RoPE    | r + d_r             | 576                                                          |

**Over tp** the heads are divided: W_uq, W_uk, W_uv are column-parallel, W_o is row-parallel. The down-projections are
small and replicated: each rank computes c of the tokens it holds. With sequence parallelism these are its own s/t, so
the gradients are partial (`"sequence"`), and the latents are gathered, r + d_r numbers a token where ordinary attention
gathers h. k_r is used by the heads of every rank, so its gradient is summed on the way back.

With YaRN the scores are multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2, as DeepSeek does.

DeepSeek-V2 (arXiv 2405.04434) section 2.1. Megatron-LM: `megatron/core/transformer/multi_latent_attention.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm import collectives as c
from minimegatron.comm.axis import ALONE, Axis
from minimegatron.comm.random import RngStreams
from minimegatron.config.model import TransformerConfig
from minimegatron.kernels import ops
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.inference_context import LayerState, StateSpec, inference_state_of
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.norm import Norm
from minimegatron.layers.param import Init, ParamLayout, new_parameter
from minimegatron.layers.recompute import recompute

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.layers.fp8.linear import ParallelFp8


class ReplicatedLinear(nn.Module):
    """`y = x A^T`, the whole of A on every tp rank, each for its own tokens."""

    def __init__(self, input_size: int, output_size: int, init: Init, dtype: torch.dtype) -> None:
        super().__init__()
        self.fp8: ParallelFp8 | None = None
        self.weight = new_parameter(ParamLayout((output_size, input_size), init=init, partial="sequence"), dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., i] -> [..., o]."""
        return F.linear(x, self.weight) if self.fp8 is None else self.fp8.linear(x, self.weight)

    def amax_axes(self, mesh: Mesh) -> dict[str, Axis]:
        """See `layers.fp8.linear`: with sequence parallelism every rank has other tokens."""
        tokens = mesh.tp if mesh.sequence_parallel else ALONE
        return {"input": tokens, "weight": ALONE, "gradient": tokens}


class MultiLatentAttention(nn.Module):
    """Multi-latent attention, as in the module docstring.

    Args:
        config: the model.
        mesh: its layout.
        layer_number: global number from 0, for messages.
        rng: dropout streams.
        core_attention: class of the core; same signature as `CoreAttention`.
        column, row: classes of the linear layers; same signatures as those of `layers/linear.py`.

    Raises:
        ConfigError: heads cannot be divided over tp.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        layer_number: int = 0,
        rng: RngStreams | None = None,
        core_attention: type[CoreAttention] = CoreAttention,
        column: Callable[..., Any] = ColumnParallelLinear,
        row: Callable[..., Any] = RowParallelLinear,
    ) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.layer_number = layer_number
        self.rng = rng
        self.window = config.window_of(layer_number)
        self.r = config.kv_lora_rank
        self.d_n = config.qk_head_dim
        self.d_r = config.qk_pos_emb_head_dim
        self.d_v, h, heads = config.v_head_dim, config.hidden_size, config.num_attention_heads
        init = Init(std=config.init_method_std)

        def up(rank: int, width: int) -> Any:
            sp = mesh.sequence_parallel
            return column(rank, heads * width, mesh.tp, init=init, bias=False, sequence_parallel=sp, dtype=config.dtype)

        q = config.q_lora_rank
        if q is None:
            self.linear_q_proj = up(h, self.d_n + self.d_r)
        else:
            self.linear_q_down_proj = ReplicatedLinear(h, q, init, config.dtype)
            self.q_layernorm = Norm(config, q)
            self.linear_q_up_proj = up(q, self.d_n + self.d_r)
        self.linear_kv_down_proj = ReplicatedLinear(h, self.r + self.d_r, init, config.dtype)
        self.kv_layernorm = Norm(config, self.r)
        self.linear_kv_up_proj = up(self.r, self.d_n + self.d_v)
        self.core_attention = core_attention(config, mesh, rng)
        self.core_attention.scale *= score_factor(config)
        self.linear_proj = row(
            heads * self.d_v,
            h,
            mesh.tp,
            init=Init(std=config.output_init_std),
            bias=False,
            sequence_parallel=mesh.sequence_parallel,
            dtype=config.dtype,
        )

    @property
    def supports_context_parallel(self) -> bool:
        """Whether a sequence may be cut over cp, which depends on the core."""
        return getattr(self.core_attention, "supports_context_parallel", False)

    def inference_state(self) -> dict[str, StateSpec]:
        """The latent, and the key after RoPE, for each token."""
        inference_state_of(self.core_attention, "the core of a MultiLatentAttention")  # `absorbed` is its formula
        return {"latent": StateSpec((1, self.r + self.d_r))}

    def queries(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """x [s', b, h] -> q [s, b, a/t, d_n + d_r], its last d_r channels after RoPE."""
        if self.config.q_lora_rank is None:
            q = self.linear_q_proj(x)
        else:
            q = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(x)))
        without, turn = q.unflatten(-1, (-1, self.d_n + self.d_r)).split([self.d_n, self.d_r], -1)
        return torch.cat([without, self._turn(turn, context)], -1)

    def latents(self, x: torch.Tensor, context: AttentionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """x [s', b, h] -> c_kv [s', b, r] of this rank's tokens, and k_r [s, b, 1, d_r] of all tokens after RoPE."""
        latent, turn = self.linear_kv_down_proj(x).split([self.r, self.d_r], -1)
        if self.mesh.sequence_parallel:
            turn = c.gather_from_sequence_region(turn, self.mesh.tp)
        else:
            turn = c.copy_to_region(turn, self.mesh.tp)
        return self.kv_layernorm(latent), self._turn(turn.unsqueeze(2), context)

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """[s, b, h] -> [s, b, h] (both cut over the sequence with sequence parallelism)."""
        q = self.queries(x, context)
        latent, k_r = self.latents(x, context)
        state = context.state_of(self.layer_number)
        if state is not None:
            latent = c.gather_from_sequence_region(latent, self.mesh.tp) if self.mesh.sequence_parallel else latent
            state.write_tokens(latent=torch.cat([latent.unsqueeze(2), k_r], -1))
            return self.linear_proj(self.absorbed(q, state))  # type: ignore[no-any-return]
        up = self.linear_kv_up_proj(latent).unflatten(-1, (-1, self.d_n + self.d_v))
        k_n, v = up.split([self.d_n, self.d_v], -1)
        k = torch.cat([k_n, k_r.expand(-1, -1, k_n.shape[2], -1)], -1)
        mask = context.mask.windowed(self.window)
        if self.config.recomputes("core_attn") and self.training:
            out = recompute(self._core, q, k, v, mask, rng=self.rng)
        else:
            out = self._core(q, k, v, mask)
        return self.linear_proj(out)

    def _core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        """Attention with values narrower than keys: padded with zeros if the core needs equal widths."""
        backend = self.core_attention.backend_for(q, v, mask)
        any_width = self.mesh.cp.size == 1 and backend in ("sdpa", "reference")
        if any_width or self.d_v == q.shape[-1]:
            return self.core_attention(q, k, v, mask)
        width = max(self.d_v, q.shape[-1])
        q, k, v = (F.pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
        return self.core_attention(q, k, v, mask).unflatten(-1, (-1, width))[..., : self.d_v].flatten(2)

    def _turn(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        assert context.rotary is not None, "the config has checked that there is RoPE"
        cos, sin = context.rotary
        return ops.rope(x, cos, sin, self.config.rotary_interleaved, kernels=self.config.kernels)

    def absorbed(self, q: torch.Tensor, state: LayerState) -> torch.Tensor:
        """Attention without keys and values: generation computes it from latents.

        Args:
            q: [n, 1, a/t, d_n + d_r] of the new tokens, from `queries`.
            state: has [latent, key after RoPE] of these and of all earlier tokens.

        Returns:
            [n, 1, a/t * d_v], the input of `linear_proj`.
        """
        w_k, w_v = self.linear_kv_up_proj.weight.unflatten(0, (-1, self.d_n + self.d_v)).split([self.d_n, self.d_v], 1)
        without, turned = q[:, 0].split([self.d_n, self.d_r], -1)
        q = torch.cat([torch.einsum("nad,adr->nar", without, w_k), turned], -1)
        keys = state.pages("latent")
        scale, kernels = self.core_attention.scale, self.config.kernels
        seen = ops.paged_attention(q, keys, keys[..., : self.r], state.context, scale, self.window, kernels=kernels)
        return torch.einsum("nar,adr->nad", seen, w_v).flatten(1).unsqueeze(1)


def score_factor(config: TransformerConfig) -> float:
    """Factor of scores beside 1 / sqrt(d): 1 except with YaRN and `yarn_mscale_all_dim`."""
    factor, mscale = config.rope_scaling_factor, config.yarn_mscale_all_dim
    if config.rope_scaling_type != "yarn" or not mscale or factor <= 1:
        return 1.0
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2
