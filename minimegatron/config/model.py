"""The model: sizes, layers, positions, initial weights, and which activations are recomputed.

Nothing here says on how many ranks it runs. Fields that only some models have (experts, hybrid layers, multi-latent
attention, multi-token prediction, FP8, a vision encoder) are inherited from `experts.py`, `hybrid.py`, `variants.py`
and `vision.py`.

| left out           | becomes                                                                  |
|--------------------|--------------------------------------------------------------------------|
| `kv_channels`      | h / a; with latent attention `qk_head_dim` + `qk_pos_emb_head_dim`       |
| `num_query_groups` | a: every query head has its own keys and values                          |
| `ffn_hidden_size`  | 4 h; if the MLP is gated, 8/3 h rounded down to a multiple of 64         |

Megatron-LM: `TransformerConfig` in `megatron/core/transformer/transformer_config.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from minimegatron.config import encoder_decoder, experts, hybrid, variants, vision
from minimegatron.config.fields import BEGUN, HOW, MODEL, RUN, TRAINED, Config, divides, free, opt
from minimegatron.errors import require

if TYPE_CHECKING:
    import torch

GATED = ("swiglu", "geglu", "geglu_tanh", "quick_geglu")
OF_BASE = free("where the packed weights lie: their contents are compared")


@dataclasses.dataclass(frozen=True)
class TransformerConfig(
    encoder_decoder.EncoderDecoderFields,
    experts.ExpertFields,
    hybrid.HybridFields,
    variants.LatentFields,
    variants.DepthFields,
    variants.BertFields,
    variants.Fp8Fields,
    vision.VisionFields,
    Config,
):
    """A decoder-only transformer, or an encoder and a decoder.

    Sizes: `h` hidden_size, `a` num_attention_heads, `g` num_query_groups, `d` kv_channels, `f` ffn_hidden_size,
    `L` num_layers, `V` vocab_size.
    """

    num_layers: int = opt(MODEL, 2, "L, transformer layers", least=1)
    hidden_size: int = opt(MODEL, 64, "h, width of the residual stream", least=1)
    num_attention_heads: int = opt(MODEL, 4, "a, query heads", least=1)
    vocab_size: int = opt(MODEL, 256, "V, logical vocabulary before padding", least=1)
    model_class: str | None = opt(
        MODEL, None, "MODULE:CLASS of the model's stages (models/contract); default what the other fields ask for"
    )
    max_position_embeddings: int = opt(
        MODEL, 1024, "longest sequence that learned positions cover; RoPE has no such limit", least=1
    )
    num_query_groups: int = opt(MODEL, None, "g, key/value heads: a = multi-head, 1 = multi-query, between = grouped")
    kv_channels: int = opt(MODEL, None, "d, width of one head; default h / a", least=1)
    ffn_hidden_size: int = opt(MODEL, None, "f, inner width of the MLP; default 4 h", least=1)
    make_vocab_size_divisible_by: int = opt(
        free("padding of the vocabulary is no part of the model"),
        128,
        "the vocabulary is padded to a multiple of this times tp",
        least=1,
    )

    normalization: str = opt(MODEL, "LayerNorm", "norm layer", ("LayerNorm", "RMSNorm"))
    layernorm_epsilon: float = opt(MODEL, 1e-5, "added to the variance", least=0.0)
    layernorm_zero_centered_gamma: bool = opt(MODEL, False, "store gamma - 1")
    layernorm_placement: str = opt(
        MODEL,
        "input",
        "norms before attention and MLP, after them and before the residual sum (OLMo 2), or both (Gemma 2); or of the "
        "residual sums, and of the embedding (BERT)",
        ("input", "output", "both", "residual"),
    )
    qk_layernorm: bool = opt(MODEL, False, "norm every query and key head before RoPE (Qwen3)")
    qk_layernorm_over_heads: bool = opt(MODEL, False, "one norm over all query heads, one over all key heads (OLMo 2)")
    attention_output_gate: bool = opt(MODEL, False, "attention's output times a sigmoid of the token (Qwen3-Next)")
    add_bias_linear: bool = opt(MODEL, True, "bias in the linear layers of attention and MLP")
    add_qkv_bias: bool = opt(MODEL, False, "bias in the QKV projection even when add_bias_linear is off (Qwen2)")
    activation: str = opt(
        MODEL,
        "gelu",
        "activation of the MLP; swiglu, geglu, geglu_tanh and quick_geglu are gated",
        (*("gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu"), *GATED),
    )
    glu_linear_offset: float = opt(
        MODEL, 0.0, "quick_geglu: added to the values that are gated (gpt-oss: 1)", least=0.0
    )
    activation_func_clamp_value: float | None = opt(
        MODEL, None, "quick_geglu: c, gates are at most c, and values within [-c, c] (gpt-oss: 7)", above=0.0
    )
    untie_embeddings_and_output_weights: bool = opt(MODEL, False, "separate matrix for the output layer")
    scale_embeddings: bool = opt(MODEL, False, "multiply the embedding of a token by sqrt(h) (Gemma)")
    value_head: bool = opt(RUN, False, "a head that gives a number for each token, beside the output layer")
    lora_rank: int | None = opt(RUN, None, "rank of adapters beside frozen weights; default none", least=1)
    lora_alpha: float = opt(RUN, 16.0, "their products are scaled by lora_alpha / lora_rank", above=0.0)
    lora_target_modules: tuple[str, ...] = opt(
        RUN,
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        "layers that have one",
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "experts"),
    )
    lora_base: str | None = opt(
        OF_BASE,
        None,
        "folder with int4 or int8 weights (minimegatron quantize) that stay packed beside adapters (QLoRA); also give "
        "it as --load, or the run that goes on",
    )
    lora_base_bits: int | None = opt(OF_BASE, None, "bits of these weights, 4 or 8; read from the folder", least=4)
    lora_base_group_size: int | None = opt(OF_BASE, None, "inputs that share a scale; read from the folder", least=8)
    final_logit_softcapping: float | None = opt(MODEL, None, "c: a logit x becomes c tanh(x / c) (Gemma 2)", above=0.0)

    position_embedding_type: str = opt(
        MODEL,
        "learned_absolute",
        "positions; mrope is RoPE with three positions a token: time, height and width; relative is a bias "
        "of each distance (T5)",
        ("learned_absolute", "rope", "mrope", "none", "relative"),
    )
    rotary_base: float = opt(MODEL, 10000.0, "RoPE's base", above=0.0)
    rotary_base_local: float | None = opt(
        MODEL,
        None,
        "its base in layers with a window, to which no scaling applies; default that of all (Gemma 3)",
        above=0.0,
    )
    rotary_percent: float = opt(MODEL, 1.0, "share of each head that is rotated", above=0.0)
    rotary_interleaved: bool = opt(MODEL, False, "rotate pairs (2i, 2i+1) instead of (i, i + d/2)")
    mrope_section: tuple[int, ...] | None = opt(
        MODEL, None, "mrope: pairs of channels that turn with time, height, width"
    )
    mrope_interleaved: bool = opt(
        MODEL, False, "mrope: channels take turns (Qwen3-VL) instead of lying section by section"
    )
    rope_scaling_type: str = opt(MODEL, "none", "RoPE frequency scaling", ("none", "linear", "llama3", "yarn"))
    rope_scaling_factor: float = opt(MODEL, 8.0, "how many times longer than trained", above=0.0)
    rope_scaling_low_freq_factor: float = opt(
        MODEL, 1.0, "llama3: wavelengths above original/low are divided by the factor", above=0.0
    )
    rope_scaling_high_freq_factor: float = opt(
        MODEL, 4.0, "llama3: wavelengths below original/high are kept", above=0.0
    )
    rope_scaling_original_max_position_embeddings: int = opt(
        MODEL, 8192, "llama3, yarn: context length of the original training", least=1
    )
    yarn_beta_fast: float = opt(
        MODEL, 32.0, "yarn: channels that turn more often than this in the trained context are kept", above=0.0
    )
    yarn_beta_slow: float = opt(MODEL, 1.0, "yarn: channels that turn less often are divided by the factor", above=0.0)
    yarn_mscale: float = opt(
        MODEL,
        0.0,
        "yarn: numerator of the attention factor, 0.1 mscale ln(factor) + 1; 0: the paper's factor",
        least=0.0,
    )
    yarn_mscale_all_dim: float = opt(MODEL, 0.0, "yarn: denominator of the attention factor, made alike", least=0.0)
    yarn_correction_range_round_to_int: bool = opt(MODEL, True, "yarn: the blend begins and ends at whole channels")
    softmax_scale: float | None = opt(MODEL, None, "factor of attention scores; default 1 / sqrt(d)", above=0.0)
    attn_logit_softcapping: float | None = opt(
        MODEL, None, "c: an attention score x, scaled, becomes c tanh(x / c) (Gemma 2)", above=0.0
    )
    softmax_type: str = opt(
        MODEL,
        "vanilla",
        "attention's softmax: over the keys, over one more of score 0, or over one whose score each head learns, a "
        "sink (gpt-oss)",
        ("vanilla", "off-by-one", "learnable"),
    )
    sliding_window: int | None = opt(MODEL, None, "a token sees itself and this many minus one before it", least=1)
    window_attn_skip_freq: str | None = opt(
        MODEL, None, "n: every n-th layer sees all tokens, the others a window; or all layers: ([1]*5+[0]*1)"
    )

    hidden_dropout: float = opt(RUN, 0.0, "dropout on residual branches and on the embedding", least=0.0, below=1.0)
    attention_dropout: float = opt(RUN, 0.0, "dropout on attention weights", least=0.0, below=1.0)
    attention_backend: str = opt(
        HOW,
        "auto",
        "core attention: torch's, the flash-attn package, Transformer Engine, the blockwise one written here, the "
        "formula; auto takes the one that is fastest on this GPU for this mask",
        ("auto", "sdpa", "flash", "te", "local", "reference"),
    )
    transformer_impl: str = opt(
        HOW,
        "local",
        "whose linear layers: those written here, or Transformer Engine's on a GPU",
        ("local", "transformer_engine"),
    )
    kernels: str = opt(
        HOW,
        "auto",
        "what computes norms, activations, RoPE, the loss and local attention: torch, CUDA kernels, or the same "
        "kernels emulated on the CPU, to learn; auto takes CUDA kernels on a GPU where they can be built",
        ("auto", "torch", "cuda", "emulated"),
    )

    init_method_std: float = opt(BEGUN, 0.02, "standard deviation of the initial weights", least=0.0)
    scale_output_init: bool = opt(
        BEGUN, True, "divide it by sqrt(2 L) for the projections that write to the residual stream"
    )

    recompute_granularity: str | None = opt(
        HOW, None, "recompute activations in the backward pass", (None, "selective", "full")
    )
    recompute_method: str = opt(HOW, "uniform", "full recompute: every n layers, or the first n", ("uniform", "block"))
    recompute_num_layers: int = opt(HOW, 1, "n of recompute_method", least=1)
    recompute_modules: tuple[str, ...] = opt(
        HOW, ("core_attn",), "selective recompute of: core_attn, mlp, moe, layernorm"
    )

    params_dtype: str = opt(TRAINED, "fp32", "dtype of weights and activations", ("fp32", "bf16", "fp16"))
    fp32_residual_connection: bool = opt(TRAINED, False, "keep the residual stream in fp32")

    def _check(self) -> None:
        if self.multi_latent_attention:  # a head of keys has channels without and with position
            self._derive(kv_channels=self.qk_head_dim + self.qk_pos_emb_head_dim)
        not_hybrid = {"moe_layer_freq": "1", "mtp_num_layers": None, "transformer_impl": "local"}
        given = {name: getattr(self, name) for name, value in not_hybrid.items() if getattr(self, name) != value}
        self._check_hybrid(self.num_layers, self.hidden_size, given)
        if self.kv_channels is None and self.has("self_attention"):
            divides(self.num_attention_heads, self.hidden_size, "num_attention_heads", "hidden_size")
        gated = self.gated_linear_unit
        self._derive(
            kv_channels=self.hidden_size // self.num_attention_heads,
            num_query_groups=self.num_attention_heads,
            # Megatron's rule: a gated MLP of the same size as the ungated one, rounded down to a multiple of 64.
            ffn_hidden_size=max(64, int(4 * self.hidden_size * 2 / 3) // 64 * 64) if gated else 4 * self.hidden_size,
        )
        divides(self.num_query_groups, self.num_attention_heads, "num_query_groups", "num_attention_heads")
        self._check_experts(self.ffn_hidden_size)
        self._check_fp8(self.num_experts, self.moe_grouped_gemm)
        decodes = [name for name in ("mtp_num_layers", "value_head", "hybrid_override_pattern") if getattr(self, name)]
        require(
            not decodes or (self.bert_head is None and not self.norms_sums),
            f"{', '.join(decodes)} with bert_head {self.bert_head}, layernorm_placement {self.layernorm_placement}: "
            "only a decoder with a final norm has these",
            f"drop {', '.join(decodes)}",
        )
        self._check_latent(self.position_embedding_type, self.qk_layernorm, self.add_bias_linear or self.add_qkv_bias)
        if self.rotates:
            self._check_rope()
        self._check_attention()
        self._check_encoder_decoder(self.num_layers)
        self._check_base()
        no_encoder = {"transformer_impl": "local", "fp8_format": None, "mtp_num_layers": None, "lora_rank": None}
        given = {name: getattr(self, name) for name, value in no_encoder.items() if getattr(self, name) != value}
        self._check_vision(given)
        require(
            self.norms_input or not self.fp32_residual_connection,
            f"layernorm_placement {self.layernorm_placement} with fp32_residual_connection: no norm rounds what "
            "attention and MLP read",
            "fp32_residual_connection=False",
        )
        require(
            self.attention_backend != "local" or self.attention_dropout == 0.0,
            f"attention_backend local with attention_dropout={self.attention_dropout}: it drops no weights",
            "attention_dropout=0, or attention_backend sdpa",
        )
        unknown = set(self.recompute_modules) - {"core_attn", "mlp", "moe", "layernorm"}
        require(
            not unknown, f"recompute_modules names {sorted(unknown)}", "choose among core_attn, mlp, moe, layernorm"
        )

    def _check_base(self) -> None:
        """Packed weights are frozen, and something else is trained."""
        if self.lora_base is None:
            return
        require(self.lora_rank is not None, "lora_base without adapters: packed weights are frozen", "--lora-rank N")
        require(
            self.lora_base_bits in (4, 8),
            f"lora_base with lora_base_bits {self.lora_base_bits}: how its weights are packed",
            "give the flag --lora-base, which reads them; or lora_base_bits and lora_base_group_size",
        )
        require(
            self.fp8_format is None,
            f"lora_base with fp8_format {self.fp8_format}: packed weights are multiplied in params_dtype",
            "drop --fp8-format",
        )

    def _check_attention(self) -> None:
        """Check scores, windows, and norms of queries and keys."""
        capped, backend = self.attn_logit_softcapping is not None, self.attention_backend
        require(
            not capped or backend in ("auto", "local", "reference"),
            f"attn_logit_softcapping with attention_backend {backend}: that program knows no cap",
            "attention_backend=auto",
        )
        names = ("attn_logit_softcapping", "softmax_scale", "attention_output_gate")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        given += ["softmax_type"] * self.has_sinks
        require(
            not given or not self.multi_latent_attention,
            f"multi_latent_attention with {' and '.join(given)}: its scores have their own scale, no cap and no sinks, "
            "its output no gate",
            f"drop {', '.join(given)}",
        )
        require(
            not self.has_sinks or backend not in ("flash", "te"),
            f"softmax_type {self.softmax_type} with attention_backend {backend}: that program knows no sinks",
            "attention_backend=auto",
        )
        require(
            not self.has_sinks or self.attention_dropout == 0.0 or backend in ("auto", "reference"),
            f"softmax_type {self.softmax_type} and attention_dropout={self.attention_dropout} with attention_backend "
            f"{backend}: only the formula drops weights beside a sink",
            "attention_backend=reference, or attention_dropout=0",
        )
        require(
            self.window_attn_skip_freq is None or self.sliding_window is not None,
            f"window_attn_skip_freq={self.window_attn_skip_freq!r} without a window",
            "give sliding_window (--window-size), or drop it",
        )
        require(
            self.sliding_window is None or any(self.windowed_layers),
            f"window_attn_skip_freq={self.window_attn_skip_freq!r} gives no layer a window",
            "drop sliding_window and window_attn_skip_freq",
        )
        require(
            not self.qk_layernorm_over_heads or (self.qk_layernorm and self.normalization == "RMSNorm"),
            f"qk_layernorm_over_heads with qk_layernorm={self.qk_layernorm}, normalization {self.normalization}",
            "qk_layernorm=True and normalization=RMSNorm",
        )

    def _check_rope(self) -> None:
        rotated = self.rotary_channels
        require(
            rotated >= 2 and rotated % 2 == 0,
            f"RoPE rotates {rotated} channels of a head",
            "choose kv_channels * rotary_percent even",
        )
        require(self.rotary_percent <= 1.0, f"rotary_percent is {self.rotary_percent}", "must be at most 1")
        for kind, slow, fast in (
            ("llama3", "rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor"),
            ("yarn", "yarn_beta_slow", "yarn_beta_fast"),
        ):
            low, high = getattr(self, slow), getattr(self, fast)
            require(
                self.rope_scaling_type != kind or low < high,
                f"{slow} is {low}, {fast} is {high}: channels between them are blended",
                f"choose {slow} < {fast}",
            )
        require(
            self.rotary_base_local is None or not self.multi_latent_attention,
            f"rotary_base_local={self.rotary_base_local} with multi_latent_attention, whose layers turn alike",
            "drop it",
        )
        section = self.mrope_section
        if self.position_embedding_type == "mrope":
            require(
                section is not None and len(section) == 3 and sum(section) == rotated // 2 and min(section) >= 0,
                f"mrope_section={section} are not three numbers whose sum is the {rotated // 2} pairs that are rotated",
                "for example mrope_section=(16, 24, 24) with kv_channels=128",
            )
        else:
            require(section is None, "mrope_section without position_embedding_type mrope", "drop it, or choose mrope")

    @property
    def rotates(self) -> bool:
        """Whether the model has rotary position embeddings."""
        return self.position_embedding_type in ("rope", "mrope")

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that RoPE rotates."""
        return self.qk_pos_emb_head_dim if self.multi_latent_attention else int(self.kv_channels * self.rotary_percent)

    @property
    def dtype(self) -> torch.dtype:
        """torch's dtype for `params_dtype`."""
        import torch  # not above, so that a command line is read without it

        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.params_dtype]

    @property
    def gated_linear_unit(self) -> bool:
        return self.activation in GATED

    @property
    def has_sinks(self) -> bool:
        """Whether attention's softmax divides by more than the sum over keys."""
        return self.softmax_type != "vanilla"

    @property
    def norms_input(self) -> bool:
        """Whether there are norms before attention and MLP."""
        return self.layernorm_placement in ("input", "both")

    @property
    def norms_output(self) -> bool:
        """Whether there are norms after attention and MLP, before the residual sum."""
        return self.layernorm_placement in ("output", "both")

    @property
    def norms_sums(self) -> bool:
        """Whether the residual sums are normed, and the embedding, in place of a norm after the last layer."""
        return self.layernorm_placement == "residual"

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """For every layer of the model whether its attention has the window.

        Megatron-LM: `is_layer_window_attention` in `megatron/core/transformer/utils.py`.
        """
        if self.sliding_window is None:
            return (False,) * self.num_layers
        if self.window_attn_skip_freq is None:
            return (True,) * self.num_layers
        return hybrid.skipping_pattern(self.window_attn_skip_freq, self.num_layers, "window_attn_skip_freq")

    def window_of(self, layer_number: int) -> int | None:
        """The attention window of layer `layer_number` (from 0); None where it sees all tokens."""
        pattern = self.windowed_layers
        return self.sliding_window if pattern[min(layer_number, len(pattern) - 1)] else None

    @property
    def score_scale(self) -> float:
        """Factor of attention scores, 1 / sqrt(d) by default."""
        return 1.0 / math.sqrt(self.kv_channels) if self.softmax_scale is None else self.softmax_scale

    @property
    def queries_per_group(self) -> int:
        """a / g: how many query heads share one key/value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def packed_heads(self) -> int:
        """Heads of queries (and of their gates), keys and values, which are rows of one matrix."""
        return self.num_attention_heads * (1 + self.attention_output_gate) + 2 * self.num_query_groups

    @property
    def output_init_std(self) -> float:
        """Initial standard deviation of the projections that write to the residual stream."""
        return self.init_method_std / math.sqrt(2 * self.num_layers) if self.scale_output_init else self.init_method_std

    def recomputes(self, module: str) -> bool:
        """Whether selective recompute covers `module`."""
        return self.recompute_granularity == "selective" and module in self.recompute_modules

    def padded_vocab_size(self, tp: int) -> int:
        """V', the smallest multiple of make_vocab_size_divisible_by * tp that holds the vocabulary."""
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple
