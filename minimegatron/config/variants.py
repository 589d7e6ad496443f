"""Fields that only some models have: multi-latent attention, multi-token prediction, BERT's heads, FP8.

Those of experts are in `config/experts`.

`TransformerConfig` (config/model.py) inherits them, so a model is still one flat list of fields with Megatron's names.

| class          | turned on by                | described in                                                   |
|----------------|-----------------------------|----------------------------------------------------------------|
| `LatentFields` | `multi_latent_attention`    | `layers/attention/mla`                                         |
| `DepthFields`  | `mtp_num_layers`            | `models/mtp`                                                   |
| `BertFields`   | `bert_head`                 | `models/bert`                                                  |
| `Fp8Fields`    | `fp8_format`                | `layers/fp8/matmul`                                            |

Tensor cores compute an FP8 product only if both dims of both factors are multiples of 16; a recipe with tiles needs
whole tiles (`MULTIPLE`). Other sizes are refused on a CPU as well, so that a run that works on a CPU works on a GPU.

Megatron-LM: `TransformerConfig`, `MLATransformerConfig` in `megatron/core/transformer/transformer_config.py`.
"""

from __future__ import annotations

import dataclasses

from minimegatron.config.fields import MODEL, RUN, TRAINED, Config, opt
from minimegatron.errors import require

# What the dims of a factor must be multiples of.
MULTIPLE = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}


@dataclasses.dataclass(frozen=True)
class LatentFields(Config):
    """Multi-latent attention (DeepSeek): keys and values are made from one short vector a token."""

    multi_latent_attention: bool = opt(MODEL, False, "attention over a compressed latent (DeepSeek-V2, V3)")
    q_lora_rank: int | None = opt(MODEL, None, "width of the queries' latent; None projects queries directly", least=1)
    kv_lora_rank: int = opt(MODEL, 32, "width of the latent of keys and values", least=1)
    qk_head_dim: int = opt(MODEL, 128, "channels of a query or key without position", least=1)
    qk_pos_emb_head_dim: int = opt(
        MODEL, 64, "channels of a query or key that RoPE turns; the key's are shared by all heads", least=2
    )
    v_head_dim: int = opt(MODEL, 128, "channels of a value", least=1)

    def _check_latent(self, position_embedding_type: str, qk_layernorm: bool, biases: bool) -> None:
        if not self.multi_latent_attention:
            return
        require(
            not qk_layernorm and not biases,
            f"multi_latent_attention with qk_layernorm={qk_layernorm} or biases: it norms its latents and has none",
            "qk_layernorm=False, add_bias_linear=False, add_qkv_bias=False",
        )
        turned = self.qk_pos_emb_head_dim
        require(turned % 2 == 0, f"qk_pos_emb_head_dim is {turned}", "choose an even number")
        require(
            position_embedding_type == "rope",
            f"multi_latent_attention with position_embedding_type {position_embedding_type}",
            "position_embedding_type=rope",
        )


@dataclasses.dataclass(frozen=True)
class DepthFields(Config):
    """Multi-token prediction (DeepSeek-V3)."""

    mtp_num_layers: int | None = opt(MODEL, None, "D, how many tokens after the next are predicted as well", least=1)
    mtp_loss_scaling_factor: float = opt(RUN, 0.1, "weight of the mean of their losses", least=0.0)


@dataclasses.dataclass(frozen=True)
class BertFields(Config):
    """An encoder in place of a decoder: tokens see each other in both directions (BERT)."""

    bert_head: str | None = opt(
        MODEL,
        None,
        "BERT, and what is read from it: the first token, masked words, or words and whether two texts belong together",
        (None, "pooler", "lm", "lm_and_binary"),
    )
    num_tokentypes: int = opt(MODEL, 0, "BERT: kinds of segments, each with an embedding", least=0)


@dataclasses.dataclass(frozen=True)
class Fp8Fields(Config):
    """FP8 in the products of linear layers."""

    fp8_format: str | None = opt(
        TRAINED,
        None,
        "FP8 products in the linear layers: e4m3 everywhere, or hybrid, whose gradients are e5m2",
        (None, "e4m3", "hybrid"),
    )
    fp8_recipe: str = opt(
        TRAINED,
        "delayed",
        "what a scale is of: a tensor and what was seen before, a tensor as it is, 128 numbers, 32 numbers",
        ("delayed", "tensorwise", "blockwise", "mxfp8"),
    )
    fp8_margin: int = opt(TRAINED, 0, "delayed: leave so many powers of two below the largest number", least=0)
    fp8_amax_history_len: int = opt(TRAINED, 1, "delayed: steps that are remembered", least=1)
    fp8_amax_compute_algo: str = opt(TRAINED, "most_recent", "delayed: which of them counts", ("most_recent", "max"))
    fp8_wgrad: bool = opt(TRAINED, True, "FP8 for the gradients of weights too")
    tp_only_amax_red: bool = opt(TRAINED, False, "delayed: agree on scales over tp and cp, not over dp")
    first_last_layers_bf16: bool = opt(TRAINED, False, "no FP8 in the first and the last layers")
    num_layers_at_start_in_bf16: int = opt(TRAINED, 1, "with first_last_layers_bf16: how many at the start", least=0)
    num_layers_at_end_in_bf16: int = opt(TRAINED, 1, "with first_last_layers_bf16: how many at the end", least=0)

    def fp8_layer(self, layer_number: int) -> bool:
        """Whether layer `layer_number` (from 0) computes its products in FP8."""
        if self.fp8_format is None:
            return False
        layers: int = self.num_layers  # type: ignore[attr-defined]
        first, last = self.num_layers_at_start_in_bf16, layers - self.num_layers_at_end_in_bf16
        return not self.first_last_layers_bf16 or first <= layer_number < last

    def _check_fp8(self, num_experts: int | None, grouped_gemm: bool) -> None:
        names = {f.name: f.default for f in dataclasses.fields(Fp8Fields)}
        changed = [name for name, default in names.items() if getattr(self, name) != default]
        if self.fp8_format is None:
            require(not changed, f"{', '.join(changed)} without fp8_format", "--fp8-format hybrid, or drop them")
            return
        recipe = self.fp8_recipe
        require(
            recipe in ("delayed", "tensorwise") or self.fp8_format == "e4m3",
            f"fp8_recipe {recipe} with fp8_format {self.fp8_format}: a tile has its own scale and does not need "
            "the range of e5m2; only its missing digit would remain",
            "--fp8-format e4m3",
        )
        of_delayed = {"fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "tp_only_amax_red"} & {*changed}
        require(
            recipe == "delayed" or not of_delayed,
            f"{', '.join(sorted(of_delayed))} with fp8_recipe {recipe}, which remembers nothing",
            "drop them, or --fp8-recipe delayed",
        )
        require(
            num_experts is None or not grouped_gemm,
            f"fp8_format {self.fp8_format} with moe_grouped_gemm: torch's grouped product has one dtype, and an expert "
            "has scales of its own",
            "drop --moe-grouped-gemm",
        )
        require(
            num_experts is None or self.transformer_impl == "local",  # type: ignore[attr-defined]
            f"transformer_impl transformer_engine and FP8 with num_experts={num_experts}: experts are our own, and "
            "would stay in the model's precision",
            "--transformer-impl local",
        )
        self._check_ends()

    def _check_ends(self) -> None:
        ends = (self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16)
        if not self.first_last_layers_bf16:
            require(
                ends == (1, 1),
                f"num_layers_at_start_in_bf16={ends[0]}, num_layers_at_end_in_bf16={ends[1]} keep no layer in bf16",
                "--first-last-layers-bf16, or drop them",
            )
            return
        require(
            self.fp8_recipe != "delayed",
            "first_last_layers_bf16 with fp8_recipe delayed (Megatron's rule)",
            "--fp8-recipe tensorwise, blockwise or mxfp8",
        )
        layers: int = self.num_layers  # type: ignore[attr-defined]
        require(
            sum(ends) < layers,
            f"{ends[0]} layers at the start and {ends[1]} at the end of {layers} stay in bf16: none is in FP8",
            f"choose numbers whose sum is below {layers}, or drop --fp8-format",
        )


def check_fp8_dims(recipe: str, what: str, **dims: int) -> None:
    """Refuse a factor of an FP8 product whose dims are not whole tiles, or no multiples that tensor cores need.

    Args:
        recipe: `fp8_recipe`.
        what: the layer or the tensor, for the message.
        dims: name -> size on one rank.

    Raises:
        ConfigError: with the size and the multiple.
    """
    multiple = MULTIPLE[recipe]
    wrong = {name: size for name, size in dims.items() if size % multiple}
    require(
        not wrong,
        f"{what}: {', '.join(f'{name} {size}' for name, size in wrong.items())} on a rank, and fp8_recipe {recipe} "
        f"takes multiples of {multiple}",
        f"choose sizes that are multiples of {multiple} after division by tp and cp, or another fp8_recipe",
    )
