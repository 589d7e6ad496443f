"""What is trained, how it is laid out, with which numbers: five frozen dataclasses with Megatron's field names.

| class               | says                                   | Megatron's counterpart                      |
|---------------------|----------------------------------------|---------------------------------------------|
| `TransformerConfig` | the model; nothing about the machine   | `TransformerConfig`, the model's half       |
| `ParallelConfig`    | who holds what                         | `ModelParallelConfig`                       |
| `OptimizerConfig`   | how weights move                       | `OptimizerConfig`, `OptimizerParamScheduler`|
| `DataConfig`        | which tokens in which order            | `GPTDatasetConfig`                          |
| `TrainingConfig`    | how long, how often, where to log      | `megatron/training/config`                  |

A field's comment is its help text on the command line (`minimegatron/training/arguments.py` turns fields into flags).
Every rule that can be checked is checked at construction: a combination that would fail, or silently mean something
else, is refused with the values, the rule and the fix. What must hold between a model and a layout is in `fits.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from minimegatron import precision, variants
from minimegatron.errors import ConfigError
from minimegatron.fields import Config, divides, opt, require
from minimegatron.stages import SCHEDULES


@dataclasses.dataclass(frozen=True)
class TransformerConfig(
    variants.ExpertFields, variants.LatentFields, variants.DepthFields, precision.Fp8Fields, Config
):
    """A decoder-only transformer.

    Sizes: `h` hidden_size, `a` num_attention_heads, `g` num_query_groups, `d` kv_channels, `f` ffn_hidden_size,
    `L` num_layers, `V` vocab_size.
    """

    num_layers: int = opt(2, "L, transformer layers")
    hidden_size: int = opt(64, "h, width of the residual stream")
    num_attention_heads: int = opt(4, "a, query heads")
    vocab_size: int = opt(256, "V, logical vocabulary before padding")
    max_position_embeddings: int = opt(1024, "longest sequence that learned positions cover; RoPE has no such limit")
    num_query_groups: int = opt(None, "g, key/value heads: a = multi-head, 1 = multi-query, between = grouped")
    kv_channels: int = opt(None, "d, width of one head; default h / a")
    ffn_hidden_size: int = opt(None, "f, inner width of the MLP; default 4 h")
    make_vocab_size_divisible_by: int = opt(128, "the vocabulary is padded to a multiple of this times tp")

    normalization: str = opt("LayerNorm", "norm layer", ("LayerNorm", "RMSNorm"))
    layernorm_epsilon: float = opt(1e-5, "added to the variance")
    layernorm_zero_centered_gamma: bool = opt(False, "store gamma - 1")
    qk_layernorm: bool = opt(False, "norm every query and key head before RoPE (Qwen3)")
    add_bias_linear: bool = opt(True, "bias in the linear layers of attention and MLP")
    add_qkv_bias: bool = opt(False, "bias in the QKV projection even when add_bias_linear is off (Qwen2)")
    activation: str = opt(
        "gelu",
        "activation of the MLP; swiglu and geglu are gated",
        ("gelu", "gelu_tanh", "relu", "squared_relu", "silu", "swiglu", "geglu"),
    )
    untie_embeddings_and_output_weights: bool = opt(False, "separate matrix for the output layer")

    position_embedding_type: str = opt(
        "learned_absolute",
        "positions; mrope is RoPE with three positions a token: time, height and width",
        ("learned_absolute", "rope", "mrope", "none"),
    )
    rotary_base: float = opt(10000.0, "RoPE's base")
    rotary_percent: float = opt(1.0, "share of each head that is rotated")
    rotary_interleaved: bool = opt(False, "rotate pairs (2i, 2i+1) instead of (i, i + d/2)")
    mrope_section: tuple[int, ...] | None = opt(None, "mrope: pairs of channels that turn with time, height, width")
    mrope_interleaved: bool = opt(False, "mrope: channels take turns (Qwen3-VL) instead of lying section by section")
    rope_scaling_type: str = opt("none", "RoPE frequency scaling", ("none", "linear", "llama3", "yarn"))
    rope_scaling_factor: float = opt(8.0, "how many times longer than trained")
    rope_scaling_low_freq_factor: float = opt(1.0, "llama3: wavelengths above original/low are divided by the factor")
    rope_scaling_high_freq_factor: float = opt(4.0, "llama3: wavelengths below original/high are kept")
    rope_scaling_original_max_position_embeddings: int = opt(
        8192, "llama3, yarn: context length of the original training"
    )
    yarn_beta_fast: float = opt(32.0, "yarn: channels that turn more often than this in the trained context are kept")
    yarn_beta_slow: float = opt(1.0, "yarn: channels that turn less often are divided by the factor")
    yarn_mscale: float = opt(0.0, "yarn: numerator of the attention factor; 0 with the next: 0.1 ln(factor) + 1")
    yarn_mscale_all_dim: float = opt(0.0, "yarn: denominator of the attention factor")
    yarn_correction_range_round_to_int: bool = opt(True, "yarn: the blend begins and ends at whole channels")
    sliding_window: int | None = opt(None, "a token sees itself and this many minus one before it")

    hidden_dropout: float = opt(0.0, "dropout on residual branches and on the embedding")
    attention_dropout: float = opt(0.0, "dropout on attention weights")
    attention_backend: str = opt(
        "auto",
        "core attention: torch's, the flash-attn package, Transformer Engine, the blockwise one written here, the "
        "formula; auto takes flash-attn where it is installed and applies, else torch's",
        ("auto", "sdpa", "flash", "te", "local", "reference"),
    )
    transformer_impl: str = opt(
        "local",
        "whose linear layers: those written here, or Transformer Engine's on a GPU",
        ("local", "transformer_engine"),
    )
    kernels: str = opt(
        "auto",
        "what computes norms, activations, RoPE, softmax, the loss and local attention: torch, CUDA kernels, or the "
        "same kernels emulated on the CPU, to learn; auto takes CUDA kernels on a GPU where they can be built",
        ("auto", "torch", "cuda", "emulated"),
    )
    apply_residual_connection_post_layernorm: bool = opt(False, "take the residual after the norm (original BERT)")

    init_method_std: float = opt(0.02, "standard deviation of the initial weights")
    scale_output_init: bool = opt(True, "divide it by sqrt(2 L) for the projections that write to the residual stream")

    recompute_granularity: str | None = opt(
        None, "recompute activations in the backward pass", (None, "selective", "full")
    )
    recompute_method: str = opt("uniform", "full recompute: every n layers, or the first n", ("uniform", "block"))
    recompute_num_layers: int = opt(1, "n of recompute_method")
    recompute_modules: tuple[str, ...] = opt(("core_attn",), "selective recompute of: core_attn, mlp, moe, layernorm")

    params_dtype: str = opt("fp32", "dtype of weights and activations", ("fp32", "bf16", "fp16"))
    fp32_residual_connection: bool = opt(False, "keep the residual stream in fp32")

    def _check(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "recompute_num_layers"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}", "must be at least 1")
        if self.multi_latent_attention:  # a head of keys has channels without and with position
            self._derive(kv_channels=self.qk_head_dim + self.qk_pos_emb_head_dim)
        if self.kv_channels is None:
            divides(self.num_attention_heads, self.hidden_size, "num_attention_heads", "hidden_size")
        gated = self.gated_linear_unit
        self._derive(
            kv_channels=self.hidden_size // self.num_attention_heads,
            num_query_groups=self.num_attention_heads,
            # Megatron's rule: a gated MLP of the same size as the ungated one, rounded down to a multiple of 64.
            ffn_hidden_size=max(64, int(4 * self.hidden_size * 2 / 3) // 64 * 64) if gated else 4 * self.hidden_size,
        )
        divides(self.num_query_groups, self.num_attention_heads, "num_query_groups", "num_attention_heads")
        self._check_experts(self.ffn_hidden_size, self.add_bias_linear)
        self._check_depths()
        self._check_fp8(self.num_experts, self.moe_grouped_gemm)
        self._check_latent(
            self.position_embedding_type, self.qk_layernorm, self.add_bias_linear or self.add_qkv_bias
        )
        if self.rotates:
            self._check_rope()
        for name in ("hidden_dropout", "attention_dropout"):
            require(
                0.0 <= getattr(self, name) < 1.0, f"{name} is {getattr(self, name)}", "choose a probability in [0, 1)"
            )
        if self.sliding_window is not None:
            require(self.sliding_window >= 1, f"sliding_window is {self.sliding_window}", "must be at least 1")
        require(
            self.attention_backend != "local" or self.attention_dropout == 0.0,
            f"attention_backend local with attention_dropout={self.attention_dropout}: it drops no weights",
            "attention_dropout=0, or attention_backend sdpa",
        )
        unknown = set(self.recompute_modules) - {"core_attn", "mlp", "moe", "layernorm"}
        require(
            not unknown, f"recompute_modules names {sorted(unknown)}", "choose among core_attn, mlp, moe, layernorm"
        )

    def _check_rope(self) -> None:
        rotated = self.rotary_channels
        require(
            rotated >= 2 and rotated % 2 == 0,
            f"RoPE rotates {rotated} channels of a head",
            "choose kv_channels * rotary_percent even",
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
        """Whether positions are angles of queries and keys."""
        return self.position_embedding_type in ("rope", "mrope")

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that RoPE turns."""
        return self.qk_pos_emb_head_dim if self.multi_latent_attention else int(self.kv_channels * self.rotary_percent)

    @property
    def dtype(self) -> torch.dtype:
        """torch's dtype for `params_dtype`."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.params_dtype]

    @property
    def gated_linear_unit(self) -> bool:
        return self.activation in ("swiglu", "geglu")

    @property
    def queries_per_group(self) -> int:
        """a / g: how many query heads share one key/value head."""
        return self.num_attention_heads // self.num_query_groups

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


ORDERED_AXES = ("tp", "cp", "ep", "dp", "pp")


@dataclasses.dataclass(frozen=True)
class ParallelConfig(Config):
    """How ranks divide the work. World = tp * cp * pp * dp; expert parallelism reuses the tp*cp*dp ranks."""

    tensor_model_parallel_size: int = opt(1, "tp: ranks that share every matrix")
    pipeline_model_parallel_size: int = opt(1, "pp: stages that share the layers")
    pipeline_schedule: str | None = opt(
        None, "order of a pipeline's work; default 1f1b, interleaved with several stages a rank", (None, *SCHEDULES)
    )
    num_layers_per_virtual_pipeline_stage: int | None = opt(None, "layers of a stage, of which a rank has several")
    num_virtual_stages_per_pipeline_rank: int | None = opt(None, "v: stages of a rank; default 1")
    microbatch_group_size_per_virtual_pipeline_stage: int | None = opt(
        None, "interleaved: microbatches that pass one stage before the rank turns to its next; default pp"
    )
    num_layers_in_first_pipeline_stage: int | None = opt(None, "layers of the first rank; the rest is cut evenly")
    num_layers_in_last_pipeline_stage: int | None = opt(None, "layers of the last rank; the rest is cut evenly")
    account_for_embedding_in_pipeline_split: bool = opt(False, "the embedding counts as a layer of the first stage")
    account_for_loss_in_pipeline_split: bool = opt(False, "the loss counts as a layer of the last stage")
    pipeline_model_parallel_layout: str | None = opt(None, "every stage written out, e.g. Et*3|(tt|)*2,L")
    variable_seq_lengths: bool = opt(False, "microbatches of different lengths: stages tell each other the shape")
    context_parallel_size: int = opt(1, "cp: ranks that share every sequence")
    cp_comm_type: str = opt(
        "p2p",
        "how cp ranks share keys and values: a ring, all-to-all over heads, all-gather, or all-to-all inside a ring",
        ("p2p", "a2a", "allgather", "a2a+p2p"),
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = opt(
        None, "for a2a+p2p: ranks of an all-to-all, then ranks of a ring; their product is cp"
    )
    expert_model_parallel_size: int = opt(1, "ep: ranks that share the experts")
    expert_tensor_parallel_size: int = opt(None, "etp: ranks that share every expert; default tp")
    sequence_parallel: bool = opt(False, "split norms, dropout and residuals over tp along the sequence")
    order: str = opt("tp-cp-ep-dp-pp", "axes from the fastest varying to the slowest")
    overlap_grad_reduce: bool = opt(False, "reduce gradient buckets while the backward pass still runs")
    ddp_bucket_size: int | None = opt(None, "elements of a gradient bucket; default max(40e6, 1e6 * dp)")
    distributed_timeout_seconds: float = opt(300.0, "longest wait for another rank")

    def _check(self) -> None:
        self._derive(expert_tensor_parallel_size=self.tensor_model_parallel_size)
        for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"):
            size = getattr(self, f"{name}_parallel_size")
            require(size >= 1, f"{name}_parallel_size is {size}", "must be at least 1")
        self._check_context()
        axes = self.order.split("-")
        missing, extra = set(ORDERED_AXES) - set(axes), [a for a in axes if a not in ORDERED_AXES]
        require(
            not extra and not (missing - {"ep"}) and len(set(axes)) == len(axes),
            f"order={self.order!r} does not name each of {'-'.join(ORDERED_AXES)} once",
            "for example tp-cp-ep-dp-pp",
        )
        self._check_pipeline()
        if self.sequence_parallel:
            require(
                self.tensor_model_parallel_size > 1,
                "sequence_parallel needs tensor_model_parallel_size > 1 (it splits over the same ranks)",
                "drop --sequence-parallel or raise --tensor-model-parallel-size",
            )

    def _check_context(self) -> None:
        cp, sizes, kind = self.context_parallel_size, self.hierarchical_context_parallel_sizes, self.cp_comm_type
        if kind != "a2a+p2p":
            require(
                sizes is None,
                f"hierarchical_context_parallel_sizes={sizes} with cp_comm_type={kind!r}",
                "they belong to cp_comm_type a2a+p2p; drop them, or choose it",
            )
            return
        require(
            sizes is not None and len(sizes) == 2 and min(sizes) >= 1 and math.prod(sizes) == cp,
            f"cp_comm_type a2a+p2p: hierarchical_context_parallel_sizes={sizes} are not two factors of cp ({cp})",
            "first the ranks of an all-to-all, then those of a ring, for example "
            f"--hierarchical-context-parallel-sizes {2 if cp % 2 == 0 else cp} {cp // 2 if cp % 2 == 0 else 1}",
        )

    @property
    def context_parallel_factors(self) -> tuple[int, int]:
        """(ranks that exchange heads by all-to-all, ranks that exchange keys and values); their product is cp."""
        if self.cp_comm_type == "a2a":
            return self.context_parallel_size, 1
        if self.hierarchical_context_parallel_sizes is not None:
            return self.hierarchical_context_parallel_sizes[0], self.hierarchical_context_parallel_sizes[1]
        return 1, self.context_parallel_size

    def _check_pipeline(self) -> None:
        cuts = (
            "pipeline_schedule num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
            "microbatch_group_size_per_virtual_pipeline_stage num_layers_in_first_pipeline_stage "
            "num_layers_in_last_pipeline_stage pipeline_model_parallel_layout"
        ).split()
        given = [name for name in cuts if getattr(self, name) is not None]
        given += [f"account_for_{x}_in_pipeline_split" for x in ("embedding", "loss") if self._accounts_for(x)]
        if given and self.pipeline_model_parallel_size == 1:
            raise ConfigError(f"{given[0]} without a pipeline", fix="drop it, or pipeline_model_parallel_size above 1")
        for name in cuts:
            value = getattr(self, name)
            smallest = 0 if name.endswith("pipeline_stage") and "_in_" in name else 1
            require(not isinstance(value, int) or value >= smallest, f"{name} is {value}", f"at least {smallest}")
        ways = {
            "pipeline_model_parallel_layout": self.pipeline_model_parallel_layout is not None,
            "num_layers_in_first_pipeline_stage or ..._last_...": any(
                n is not None
                for n in (self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage)
            ),
            "account_for_..._in_pipeline_split": self._accounts_for("embedding") or self._accounts_for("loss"),
            "num_layers_per_virtual_pipeline_stage": self.num_layers_per_virtual_pipeline_stage is not None,
        }
        used = [way for way, wanted in ways.items() if wanted]
        require(
            len(used) <= 1,
            f"{' and '.join(used)} each say where the layers go",
            "give one; num_virtual_stages_per_pipeline_rank goes with all but the first and the last of them",
        )

    def _accounts_for(self, end: str) -> bool:
        return bool(getattr(self, f"account_for_{end}_in_pipeline_split"))

    def data_parallel_size(self, world_size: int) -> int:
        """dp = world / (tp * cp * pp).

        Raises:
            ConfigError: the world is not a multiple of the model's ranks, or cannot hold the expert layout.
        """
        model = self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size
        require(
            world_size % model == 0 and world_size > 0,
            f"{world_size} ranks cannot be divided into groups of tp*cp*pp = {self.tensor_model_parallel_size}*"
            f"{self.context_parallel_size}*{self.pipeline_model_parallel_size} = {model}",
            f"start {max(1, world_size // model) * model} ranks, or change the layout",
        )
        expert = self.expert_tensor_parallel_size * self.expert_model_parallel_size * self.pipeline_model_parallel_size
        require(
            world_size % expert == 0,
            f"{world_size} ranks cannot be divided into expert groups of etp*ep*pp = "
            f"{self.expert_tensor_parallel_size}*"
            f"{self.expert_model_parallel_size}*{self.pipeline_model_parallel_size} = {expert}",
            "choose ep so that etp*ep*pp divides the number of ranks",
        )
        return world_size // model


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Config):
    """Optimizer, its schedules, clipping and loss scaling."""

    optimizer: str = opt("adam", "adam is AdamW: decoupled weight decay", ("adam", "sgd"))
    lr: float = opt(1e-3, "peak learning rate")
    min_lr: float = opt(0.0, "the schedule never goes below")
    weight_decay: float = opt(0.01, "decoupled; not on biases and 1-D parameters")
    start_weight_decay: float | None = opt(None, "first value of a weight decay ramp")
    end_weight_decay: float | None = opt(None, "last value of a weight decay ramp")
    weight_decay_incr_style: str = opt("constant", "shape of that ramp", ("constant", "linear", "cosine"))
    adam_beta1: float = opt(0.9, "decay of the first moment")
    adam_beta2: float = opt(0.999, "decay of the second moment")
    adam_eps: float = opt(1e-8, "added to the square root of the second moment")
    sgd_momentum: float = opt(0.9, "momentum of sgd")
    clip_grad: float = opt(1.0, "global gradient norm is cut to this; 0 switches clipping off")
    lr_decay_style: str = opt(
        "linear", "schedule after the warm-up", ("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = opt(None, "iterations until min_lr; default train_iters")
    lr_warmup_iters: int = opt(0, "iterations of linear warm-up")
    lr_warmup_fraction: float | None = opt(None, "warm-up as a share of the decay, instead of lr_warmup_iters")
    lr_decay_samples: int | None = opt(None, "samples until min_lr, instead of lr_decay_iters")
    lr_warmup_samples: int = opt(0, "samples of linear warm-up, instead of lr_warmup_iters")
    lr_warmup_init: float = opt(0.0, "learning rate at the start of the warm-up")
    lr_wsd_decay_style: str = opt("exponential", "WSD's final decay", ("exponential", "linear", "cosine", "minus_sqrt"))
    lr_wsd_decay_iters: int | None = opt(None, "iterations of WSD's final decay")
    loss_scale: float | None = opt(None, "constant loss scale for fp16; default dynamic")
    initial_loss_scale: float = opt(2.0**32, "first dynamic loss scale")
    min_loss_scale: float = opt(1.0, "dynamic loss scale never goes below")
    loss_scale_window: int = opt(1000, "clean steps before the scale doubles")
    hysteresis: int = opt(2, "overflows before the scale halves")
    check_for_nan_in_loss_and_grad: bool = opt(True, "stop with exit status 6 on a number that is not finite")
    log_num_zeros_in_grad: bool = opt(False, "count the zeros of the gradient")

    def _check(self) -> None:
        require(self.lr >= self.min_lr >= 0.0, f"lr={self.lr}, min_lr={self.min_lr}", "choose lr >= min_lr >= 0")
        require(self.clip_grad >= 0.0, f"clip_grad is {self.clip_grad}", "0 switches clipping off; otherwise positive")
        require(self.lr_warmup_iters >= 0, f"lr_warmup_iters is {self.lr_warmup_iters}", "must not be negative")
        warmups = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
        for names in (("lr_decay_iters", "lr_decay_samples"), warmups):
            given = [name for name in names if getattr(self, name)]
            require(len(given) <= 1, f"{' and '.join(given)} are given", "give one of them")
        if self.lr_warmup_fraction is not None:
            require(
                0.0 <= self.lr_warmup_fraction <= 1.0,
                f"lr_warmup_fraction is {self.lr_warmup_fraction}",
                "choose it in [0, 1]",
            )
        if self.lr_decay_style == "WSD":
            require(
                self.lr_wsd_decay_iters is not None,
                "lr_decay_style WSD without lr_wsd_decay_iters",
                "give --lr-wsd-decay-iters",
            )


@dataclasses.dataclass(frozen=True)
class DataConfig(Config):
    """Where tokens come from."""

    data_path: tuple[str, ...] = opt((), "prefix of .bin/.idx, or weight prefix weight prefix ...")
    split: str = opt("969,30,1", "shares of train, validation and test documents")
    train_data_path: tuple[str, ...] = opt((), "like data_path, for the training set alone; then no split")
    valid_data_path: tuple[str, ...] = opt((), "like data_path, for the validation set alone")
    test_data_path: tuple[str, ...] = opt((), "like data_path, for the test set alone")
    data_args_path: str | None = opt(None, "file that holds what data_path would be given")
    mock_data: bool = opt(False, "synthetic, learnable tokens; no file is read")
    corpus: str | None = opt(
        None,
        "text that every machine has: Python's standard library, its sources and docstrings, or one of the two",
        (None, "stdlib", "stdlib-code", "stdlib-docs"),
    )
    corpus_path: str = opt(".corpus", "folder in which the corpus, its tokenizer and its tokens are made once and kept")
    data_cache_path: str | None = opt(None, "folder for the index arrays; default beside the data")
    seq_length: int = opt(256, "tokens of a sample")
    tokenizer_type: str | None = opt(None, "tokenizer of the data")
    tokenizer_model: str | None = opt(None, "folder or file of the tokenizer")
    vocab_file: str | None = opt(None, "vocab.json of GPT2BPETokenizer")
    merge_file: str | None = opt(None, "merges.txt of GPT2BPETokenizer")
    reset_position_ids: bool = opt(False, "positions start again after an end-of-document token")
    reset_attention_mask: bool = opt(False, "tokens do not attend across documents")
    eod_mask_loss: bool = opt(False, "no loss on end-of-document tokens")
    sequence_packing: bool = opt(
        False, "samples of whole documents that do not see each other, instead of a stream cut every seq_length tokens"
    )

    def _check(self) -> None:
        require(self.seq_length >= 1, f"seq_length is {self.seq_length}", "must be at least 1")
        per_split = self.train_data_path or self.valid_data_path or self.test_data_path
        named: dict[str, Any] = {"data_path": self.data_path}
        named |= {"train_data_path, valid_data_path or test_data_path": per_split}
        named |= {"data_args_path": self.data_args_path, "mock_data": self.mock_data, "corpus": self.corpus}
        given = [name for name, value in named.items() if value]
        require(len(given) <= 1, f"{' and '.join(given)} are given", "one source of tokens: drop the others")


@dataclasses.dataclass(frozen=True)
class TrainingConfig(Config):
    """How long to train, and what to print on the way."""

    micro_batch_size: int = opt(1, "samples of one forward pass on one rank")
    global_batch_size: int | None = opt(
        None, "samples of one optimizer step over all ranks; default micro_batch_size * dp"
    )
    rampup_batch_size: tuple[int, ...] | None = opt(None, "start, increment, samples of a batch size ramp-up")
    decrease_batch_size_if_needed: bool = opt(
        False, "round the global batch size down to a multiple of micro_batch_size * dp"
    )
    train_iters: int = opt(100, "optimizer steps")
    train_samples: int | None = opt(None, "samples to train on, instead of train_iters")
    seed: int = opt(1234, "of weights, data order and dropout")
    log_interval: int = opt(1, "steps between log lines")
    eval_interval: int | None = opt(None, "steps between evaluations; default never")
    eval_iters: int = opt(10, "batches of one evaluation")
    exit_interval: int | None = opt(None, "stop at the first iteration that this divides")
    exit_duration_in_mins: float | None = opt(None, "stop after so many minutes")
    tensorboard_dir: str | None = opt(None, "folder for TensorBoard")
    wandb_project: str | None = opt(None, "also log to this Weights & Biases project")
    wandb_exp_name: str | None = opt(None, "name of the run there")
    wandb_entity: str | None = opt(None, "team or user there")
    wandb_save_dir: str | None = opt(None, "folder for its local files")
    log_file: str | None = opt(None, "also write one JSON object a step to this file")
    check_replicas_interval: int | None = opt(None, "steps between bitwise comparisons of replicated weights")
    cuda_graph_impl: str = opt(
        "none",
        "play a step's forward and backward passes back as a CUDA graph",
        ("none", "local", "transformer_engine"),
    )
    cuda_graph_scope: str = opt("full_iteration", "what a graph holds", ("full_iteration",))
    cuda_graph_warmup_steps: int = opt(3, "steps before the recording")
    profile: bool = opt(False, "profile some steps: NVTX ranges for nsys on a GPU, or with use_pytorch_profiler")
    use_pytorch_profiler: bool = opt(False, "torch's profiler, which writes a Chrome trace")
    profile_step_start: int = opt(10, "steps before the profile begins")
    profile_step_end: int = opt(12, "steps before it ends")
    profile_ranks: tuple[int, ...] = opt((0,), "which ranks are profiled")
    profile_dir: str = opt("profile", "folder for the traces")
    distributed_backend: str | None = opt(
        None, "nccl or gloo; default nccl with one GPU a rank, else gloo", (None, "nccl", "gloo")
    )

    def _check(self) -> None:
        for name in (
            "micro_batch_size",
            "train_iters",
            "log_interval",
            "train_samples",
            "eval_interval",
            "exit_interval",
        ):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} is {value}", "must be at least 1")
        require(
            self.eval_iters >= 0, f"eval_iters is {self.eval_iters}", "0 switches evaluation off; otherwise positive"
        )
        require(
            0 <= self.profile_step_start < self.profile_step_end,
            f"profile_step_start={self.profile_step_start}, profile_step_end={self.profile_step_end}",
            "choose 0 <= start < end",
        )
        steps = self.cuda_graph_warmup_steps
        require(steps >= 1, f"cuda_graph_warmup_steps is {steps}", "at least 1: libraries choose their kernels in it")
        require(
            self.profile or not self.use_pytorch_profiler,
            "use_pytorch_profiler without profile",
            "--profile, or drop --use-pytorch-profiler",
        )
        if self.rampup_batch_size is not None:
            require(
                len(self.rampup_batch_size) == 3,
                f"rampup_batch_size is {self.rampup_batch_size}",
                "give start, increment, samples",
            )
