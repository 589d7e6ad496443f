"""Self-attention with its heads divided over tp.

The problem in a sentence: the heads of a layer are computed independently, so each rank can have some of them.

    qkv = x A_qkv^T      column-parallel: a rank computes q, k, v of its own heads
    o   = softmax(q k^T / sqrt(d) + mask) v          no message
    y   = o A_proj^T     row-parallel: the sum over heads is the sum over ranks

One all-reduce forward and one backward, as for any column-row pair.

Grouped-query attention shares one key/value head among a/g query heads. The rows of A_qkv are therefore stored *per
group*, `[q ... q, k, v]` for group 0, then for group 1, ...: cutting that matrix into t equal blocks gives every rank
whole groups, which is why Megatron packs it so. When there are fewer groups than ranks (g < t) a block is only a part
of a group: the ranks gather the packed output, whose gradient is summed because ranks use different heads, and pick
their query heads and their one key/value head. No row of A_qkv ever lives on two ranks, so nothing needs a second
reduction.

| tensor          | shape                                            |
|-----------------|--------------------------------------------------|
| x, y            | [s, b, h], [s/t, b, h] with sequence parallelism |
| packed qkv      | [s, b, g/t * (a/g + 2) * d]                      |
| q, o            | [s, b, a/t, d]                                   |
| k, v            | [s, b, max(1, g/t), d]                           |

With context parallelism s is s/cp everywhere here; only the core attention needs the other ranks' tokens
(`layers/attention/context_parallel.py`). Which query sees which key is an `AttentionMask` (`layers/attention/mask.py`):
its own past (causal), at most `sliding_window` tokens including itself, and only its own document when there are
`document_ids`. `--attention-backend` chooses the implementation (`layers/attention/core_attention.py`). In generation
the core keeps keys and values, and reads those of earlier tokens (`layers/inference_context.py`).

Vaswani et al. 2017; Ainslie et al. 2023 (arXiv 2305.13245). Megatron-LM: `megatron/core/transformer/attention.py`,
`dot_product_attention.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from minimegatron.kernels import ops
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.inference_context import InferenceContext, LayerState, StateSpec, inference_state_of
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.norm import HeadsNorm, Norm
from minimegatron.layers.param import Init, layout_of
from minimegatron.layers.recompute import recompute_module

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.comm.random import RngStreams
    from minimegatron.config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """The properties of the batch that every layer needs; made once per forward pass.

    Attributes:
        rotary: cos and sin, [n, b, 1, d/2] each, or None without RoPE; n tokens are on this cp rank. Where layers
            with a window have a base of their own, also theirs.
        mask: the attention mask, in positions of the whole sequence.
        inference: in generation, the states that layers keep of earlier tokens; None in training.
    """

    rotary: tuple[torch.Tensor, ...] | None = None
    mask: AttentionMask = AttentionMask()
    inference: InferenceContext | None = None

    def rotary_of(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """cos and sin of RoPE for a layer with this window; None without RoPE."""
        if self.rotary is None:
            return None
        cos, sin = self.rotary[:2] if window is None else self.rotary[-2:]
        return cos, sin

    def state_of(self, layer_number: int) -> LayerState | None:
        """The state that a layer keeps of earlier tokens; None in training."""
        return None if self.inference is None else LayerState(self.inference, layer_number)


class SelfAttention(nn.Module):
    """QKV projection, (norm of q and k), RoPE, core attention, (output gate), output projection.

    With `attention_output_gate` each query head has a gate of its width: `o * sigmoid(gate)` is projected. In the rows
    of a group its gates follow its queries, [q ... q, gate ... gate, k, v], as in Megatron-LM.

    Args:
        config: the model.
        mesh: its layout.
        layer_number: global number from 0, for messages.
        rng: dropout streams.
        core_attention: class of the core; same signature as `CoreAttention`.
        column, row: classes of the linear layers; same signatures as those of `layers/linear.py`.

    Raises:
        ConfigError: heads or packed rows cannot be divided over tp.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        layer_number: int = 0,
        rng: RngStreams | None = None,
        core_attention: Callable[..., Any] = CoreAttention,
        column: Callable[..., Any] = ColumnParallelLinear,
        row: Callable[..., Any] = RowParallelLinear,
    ) -> None:
        super().__init__()
        self.config = config
        self.tp = mesh.tp
        self.layer_number = layer_number
        self.rng = rng
        self.window = config.window_of(layer_number)
        self.d, self.per_group = config.kv_channels, config.queries_per_group
        self.split_group = config.num_query_groups < mesh.tp.size
        self.of_group = [self.per_group] * (1 + config.attention_output_gate) + [1, 1]  # heads: q, (gate), k, v
        rows = config.packed_heads * self.d
        init = Init(std=config.init_method_std)
        self.linear_qkv = column(
            config.hidden_size,
            rows,
            mesh.tp,
            init=init,
            bias=config.add_bias_linear or config.add_qkv_bias,
            sequence_parallel=mesh.sequence_parallel,
            gather_output=self.split_group,
            gather_reduces_gradient=True,
            dtype=config.dtype,
        )
        qkv = self.linear_qkv.weight
        qkv.param_layout = dataclasses.replace(layout_of(qkv), fused=tuple(n * self.d for n in self.of_group))
        self.q_layernorm: Norm | HeadsNorm | None = None
        self.k_layernorm: Norm | HeadsNorm | None = None
        if config.qk_layernorm_over_heads:
            self.q_layernorm = HeadsNorm(config, config.num_attention_heads, mesh.tp)
            self.k_layernorm = HeadsNorm(config, config.num_query_groups, mesh.tp)
        elif config.qk_layernorm:
            self.q_layernorm = Norm(config, self.d, partial="heads")
            self.k_layernorm = Norm(config, self.d, partial="heads")
        self.core_attention = core_attention(config, mesh, rng)
        if config.recomputes("core_attn"):
            recompute_module(self.core_attention, rng)
        self.linear_proj = row(
            config.num_attention_heads * self.d,
            config.hidden_size,
            mesh.tp,
            init=Init(std=config.output_init_std),
            bias=config.add_bias_linear,
            sequence_parallel=mesh.sequence_parallel,
            dtype=config.dtype,
        )

    @property
    def supports_context_parallel(self) -> bool:
        """Whether a sequence may be cut over cp, which depends on the core."""
        return getattr(self.core_attention, "supports_context_parallel", False)

    def inference_state(self) -> dict[str, StateSpec]:
        """The state that the core keeps."""
        return inference_state_of(self.core_attention, "the core of a SelfAttention")

    @property
    def ropes_and_keeps(self) -> bool:
        """Whether one kernel may do in generation what lies between the product and the attention: RoPE, and keys and
        values into the core's pages (`ops.rope_and_keep`)."""
        own = getattr(type(self.core_attention), "generate", None) is CoreAttention.generate
        return own and self.plain

    @property
    def plain(self) -> bool:
        """Whether RoPE is all that lies between the product and the core."""
        return self.q_layernorm is None and not self.split_group and len(self.of_group) == 3

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """x [s, b, h] -> queries, (gates,) key and value of each group, [s, b, groups, a/g + 2, d]."""
        y: torch.Tensor = self.linear_qkv(x)
        return y.view(*y.shape[:-1], -1, sum(self.of_group), self.d)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [s, b, h] -> q (and its gates) [s, b, a/t, d], k and v [s, b, max(1, g/t), d]."""
        packed = self.packed(x)
        if self.split_group:
            ranks_per_group = self.tp.size // packed.shape[2]
            packed = packed[:, :, self.tp.rank // ranks_per_group].unsqueeze(2)
        *queries, k, v = packed.split(self.of_group, 3)
        if self.split_group:
            heads = self.per_group // ranks_per_group
            queries = [of.narrow(3, self.tp.rank % ranks_per_group * heads, heads) for of in queries]
        return *(of.flatten(2, 3) for of in queries), k.squeeze(3), v.squeeze(3)

    def heads(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, ...]:
        """`project`, then the norms of queries and keys, and RoPE."""
        interleaved, kernels = self.config.rotary_interleaved, self.config.kernels
        if rotary is not None and self.plain:
            return ops.heads(self.packed(x), *rotary, interleaved, kernels=kernels)
        q, *gate, k, v = self.project(x)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if rotary is not None:
            q, k = (ops.rope(t, *rotary, interleaved, kernels=kernels) for t in (q, k))
        return q, *gate, k, v

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """[s, b, h] -> [s, b, h] (both cut over the sequence with sequence parallelism)."""
        mask, state = context.mask.windowed(self.window), context.state_of(self.layer_number)
        rotary = context.rotary_of(self.window)
        if state is not None and rotary is not None and self.ropes_and_keeps:
            q = ops.rope_and_keep(
                self.packed(x),
                *rotary,
                self.config.rotary_interleaved,
                state.pages("key"),
                state.pages("value"),
                state.context.rows,
                kernels=self.config.kernels,
            )
            return self.linear_proj(self.core_attention.attend_pages(q, mask, state))  # type: ignore[no-any-return]
        q, *gates, k, v = self.heads(x, rotary)
        if state is None:
            out = self.core_attention(q, k, v, mask)
        else:
            out = self.core_attention.generate(q, k, v, mask, state)
        for gate in gates:
            out = out * gate.sigmoid().view_as(out)
        return self.linear_proj(out)  # type: ignore[no-any-return]
