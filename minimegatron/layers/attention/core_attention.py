"""softmax(q k^T / sqrt(d) + mask) v, by one of six implementations.

| backend     | computed by                                                      | where                      |
|-------------|------------------------------------------------------------------|----------------------------|
| `reference` | the formula: the whole matrix of weights, softmax in fp32        | anywhere; s x s memory     |
| `local`     | this package: a kernel, or blockwise in torch (`kernels/blockwise`) | anywhere; no dropout    |
| `sdpa`      | torch's `scaled_dot_product_attention` (FlashAttention-2, cuDNN) | anywhere                   |
| `flash`     | the flash-attn package                                           | GPU, 16 bits               |
| `varlen`    | torch's `varlen_attn`; only `auto` chooses it                    | GPU, 16 bits; no dropout   |
| `te`        | Transformer Engine's `DotProductAttention`                       | GPU, 16 bits; no documents |

`auto` chooses the fastest on this machine for this mask (`layers/attention/choice`): on a CPU `local`, where its kernel
computes, or `sdpa`; on a GPU `sdpa`, `flash` or `varlen`.

An `AttentionMask` (`layers/attention/mask`) says which query sees which key: `table(rows, columns)` is the boolean
matrix, `dense(s)` the same for a whole sequence, or None where it is `plain(s)` and causal attention says it already,
and `boundaries` are where documents begin, which `flash` and `varlen` take. Under context parallelism the sequence is
on several ranks, and `layers/attention/context_parallel` calls the backend on *some* of the keys at a time.

A sink (`softmax_type`: gpt-oss) is one more key of a learned score, whose value is 0. `reference` has it in the matrix,
all others join it as a piece of its own (`layers/attention/pieces`), the sequence being the piece before.

In generation (`generate`) the core writes keys and values of new tokens into pages and attends to the pages
(`ops.paged_attention`), whatever the backend.

Megatron-LM: `transformer/dot_product_attention.py`, `TEDotProductAttention` in `extensions/transformer_engine.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm.axis import ALONE
from minimegatron.errors import ConfigError
from minimegatron.kernels import ops
from minimegatron.layers.attention.choice import Task, choose_backend, fastest, groups_share, this_machine
from minimegatron.layers.attention.context_parallel import context_attention, piecewise_attention
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.dropout import Dropout
from minimegatron.layers.inference_context import LayerState, StateSpec
from minimegatron.layers.param import Init, ParamLayout, cut_evenly, new_parameter

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.comm.random import RngStreams
    from minimegatron.config import TransformerConfig


class CoreAttention(nn.Module):
    """Attention of queries to keys and values, on this rank's heads.

    Args:
        config: backend, head width, attention dropout.
        mesh: its cp axes share the sequence.
        rng: streams for the dropout of attention weights.

    Raises:
        ConfigError: see `choose_backend`.
    """

    supports_context_parallel = True
    softmax_offset: torch.Tensor | None

    def __init__(self, config: TransformerConfig, mesh: Mesh, rng: RngStreams | None = None) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.scale, self.softcap = config.score_scale, config.attn_logit_softcapping
        self.backend = choose_backend(config, mesh)
        self.machine = this_machine(mesh.device)
        self.dropout = Dropout(config.attention_dropout, rng, different_over_tp=True)
        self._engine: Any = None
        # a sink for each head (see above), divided over tp as heads are; learned, 0, or none
        heads, sink = config.num_attention_heads, None
        if config.softmax_type == "learnable":
            parts = cut_evenly(heads, mesh.tp, "softmax_offset")
            layout = ParamLayout((heads,), 0, parts, mesh.tp.rank, Init(std=config.init_method_std))
            self.softmax_offset = new_parameter(layout, config.dtype)
        else:
            if config.has_sinks:
                sink = torch.zeros(heads // mesh.tp.size, dtype=config.dtype, device="cpu")
            self.register_buffer("softmax_offset", sink, persistent=False)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask | None = None
    ) -> torch.Tensor:
        """q [n, b, a', d], k and v [n, b, g', d] -> [n, b, a' * d]; n = s / cp tokens, the default mask is causal."""
        mask = mask or AttentionMask()
        sink = self.softmax_offset
        if self.mesh.cp.size > 1:
            out = context_attention(q, k, v, mask, self.mesh, self.scale, self.backend, self.attend, self.softcap, sink)
        else:
            out = self.attend(q, k, v, mask, sink)
        return out.flatten(2)

    def inference_state(self) -> dict[str, StateSpec]:
        """The key and the value of this rank's groups, for each token."""
        groups = max(1, self.config.num_query_groups // self.mesh.tp.size)
        return {name: StateSpec((groups, self.config.kv_channels), by_head=True) for name in ("key", "value")}

    def generate(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask, state: LayerState
    ) -> torch.Tensor:
        """`forward` for new tokens: keeps their keys and values, and attends to them and to those of earlier tokens."""
        state.write_tokens(key=k, value=v)
        return self.attend_pages(q, mask, state)

    def attend_pages(self, q: torch.Tensor, mask: AttentionMask, state: LayerState) -> torch.Tensor:
        """`generate`, where keys and values of the new tokens are in pages already."""
        out = ops.paged_attention(
            q[:, 0],
            state.pages("key"),
            state.pages("value"),
            state.context,
            self.scale,
            mask.window,
            self.softcap,
            self.softmax_offset,
            kernels=self.config.kernels,
        )
        return out.flatten(1).unsqueeze(1)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: AttentionMask,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over a whole sequence on this rank: q [s, b, a', d], k and v [s, b, g', d] -> [s, b, a', d].

        Args:
            sink: [a'], the score of one more key for each head, see `layers/attention/pieces`.
        """
        if sink is not None and self.backend != "reference":  # other programs take no sink; what joins pieces does
            return piecewise_attention(q, k, v, mask, ALONE, self.scale, self.backend, self.softcap, sink)
        backend = self.backend_for(q, v, mask)
        if backend in ("flash", "varlen", "te"):
            return getattr(self, f"_{backend}")(q, k, v, mask)  # type: ignore[no-any-return]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        more = () if sink is None else (sink,)
        out: torch.Tensor = getattr(self, f"_{backend}")(q, k, v, mask, *more)
        return out.permute(2, 0, 1, 3)

    def backend_for(self, q: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> str:
        """The backend for these shapes under this mask: `backend`, with `auto` resolved."""
        if self.backend != "auto":
            return self.backend
        found = fastest(self.machine, self._task(q, v, mask))
        # the table does not know whether the kernel can compute here: not under torch.compile, nor without a compiler
        return "sdpa" if found == "local" and not ops.attends_on_a_cpu(q, v, kernels=self.config.kernels) else found

    def _task(self, q: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> Task:
        s = q.shape[0]
        return Task(q.dtype, q.shape[-1], v.shape[-1], not mask.plain(s), self._dropout_p > 0.0)

    @property
    def _dropout_p(self) -> float:
        return self.dropout.p if self.training else 0.0

    def _reference(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: AttentionMask,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The formula, softmax in fp32: tests compare the other backends with it."""
        repeat, s = q.shape[1] // k.shape[1], q.shape[2]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~mask.table((0, s), (0, s), q.device), -torch.inf)
        if sink is not None:
            scores = torch.cat([scores, sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
        weights = scores.softmax(-1)[..., :s].to(q.dtype)
        return self.dropout(weights) @ v

    def _local(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        return ops.flash_attention(q, k, v, mask, self.scale, self.softcap, kernels=self.config.kernels)

    def _sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        table = mask.dense(q.shape[2], q.device)
        task = Task(q.dtype, q.shape[-1], v.shape[-1], rule=table is not None)
        if k.shape[1] != q.shape[1] and not groups_share(self.machine, task):
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        with self.dropout.stream():
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=table,
                dropout_p=self._dropout_p,
                is_causal=table is None and mask.causal,
                scale=self.scale,
                enable_gqa=k.shape[1] != q.shape[1],
            )

    def _flash(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        options = {
            "dropout_p": self._dropout_p,
            "softmax_scale": self.scale,
            "causal": mask.causal,
            "window_size": window_size(mask),
        }
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))  # [b, s, heads, d]; only the last dim has to be dense
        with self.dropout.stream():
            if mask.document_ids is None:
                out = flash_attn_func(q, k, v, **options)
            else:
                borders, longest = mask.boundaries(q.device)
                rows = (t.flatten(0, 1) for t in (q, k, v))
                out = flash_attn_varlen_func(*rows, borders, borders, longest, longest, **options)
                out = out.unflatten(0, q.shape[:2])
        return out.transpose(0, 1)

    def _varlen(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        s, b = q.shape[:2]
        if mask.document_ids is None:  # a window alone: each sample is one document
            borders, longest = torch.arange(0, b * s + 1, s, dtype=torch.int32, device=q.device), s
        else:
            borders, longest = mask.boundaries(q.device)
        q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
        grouped, options = k.shape[1] != q.shape[1], {"scale": self.scale, "window_size": window_size(mask)}
        out = varlen_attn(q, k, v, borders, borders, longest, longest, enable_gqa=grouped, **options)  # type: ignore[arg-type]
        assert isinstance(out, torch.Tensor), "no auxiliary output was asked for"
        return out.unflatten(0, (b, s)).transpose(0, 1)

    def _te(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        if mask.document_ids is not None:
            raise ConfigError(
                "attention_backend te cannot keep documents apart (reset_attention_mask)",
                fix="attention_backend auto",
            )
        if self._engine is None:
            from transformer_engine.pytorch import DotProductAttention

            self._engine = DotProductAttention(
                num_attention_heads=q.shape[2],
                kv_channels=q.shape[3],
                num_gqa_groups=k.shape[2],
                attention_dropout=self.dropout.p,
                qkv_format="sbhd",
                attn_mask_type="causal" if mask.causal else "no_mask",
                window_size=window_size(mask),
                softmax_scale=self.scale,
            )
        self._engine.train(self.training)
        with self.dropout.stream():
            return self._engine(q.contiguous(), k.contiguous(), v.contiguous()).view(q.shape)


def window_size(mask: AttentionMask) -> tuple[int, int]:
    """The packages' `window_size`: how many keys before and after itself a query sees, -1 for all."""
    back = -1 if mask.window is None else mask.window - 1
    return back, 0 if mask.causal else back
