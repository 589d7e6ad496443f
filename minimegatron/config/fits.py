"""Rules between a model and a layout: checked before any rank starts, and again where the model is built.

| must divide              | what                                              | else                       |
|--------------------------|---------------------------------------------------|----------------------------|
| tp                       | heads, MLP width; with few groups the packed rows | a rank has half a head     |
| tp                       | groups of Mamba-2, key heads of Gated DeltaNet    | a rank has half a group    |
| 2 cp, with sp 2 cp tp    | the sequence                                      | zigzag has no equal chunks |
| cp, if it exchanges heads | heads of a tp rank                               | a rank has no head         |
| ep, etp                  | experts, their width                              | a rank has half an expert  |
| 16, 32 or 128 (FP8)      | both dims of every matrix on a rank               | tensor cores refuse it     |

Rules of one configuration alone are checked by its class in `config/`; those of pipeline stages by `stages.py`.

Megatron-LM: `validate_args` in `megatron/training/arguments.py`, and assertions in the layers.
"""

from __future__ import annotations

from minimegatron.config.encoder_decoder import check_encoder_decoder_fits
from minimegatron.config.fields import divides
from minimegatron.config.model import TransformerConfig
from minimegatron.config.parallel import ParallelConfig
from minimegatron.config.stages import expand_layout, plan_stages
from minimegatron.config.variants import check_fp8_dims
from minimegatron.errors import ConfigError, require


def check_model_fits(model: TransformerConfig, parallel: ParallelConfig, seq_length: int | None = None) -> None:
    """Check all rules between a model and a layout.

    Raises:
        ConfigError: with the two values, the rule and the values that would work.
    """
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if model.has("self_attention"):
        check_heads_fit(model, tp)
    if model.has("mlp"):
        divides(tp, model.ffn_hidden_size, "tensor_model_parallel_size", "ffn_hidden_size")
    if model.sees:
        divides(tp, model.vision_num_attention_heads, "tensor_model_parallel_size", "vision_num_attention_heads")
        divides(tp, model.vision_ffn_hidden_size, "tensor_model_parallel_size", "vision_ffn_hidden_size")
    if model.has("mamba"):
        divides(tp, model.mamba_num_groups, "tensor_model_parallel_size", "mamba_num_groups")
    if model.has("gated_delta_net"):
        divides(tp, model.linear_num_key_heads, "tensor_model_parallel_size", "linear_num_key_heads")
    check_context_fits(model, parallel)
    check_experts_fit(model, parallel)
    if model.encoder_num_layers is not None:
        check_encoder_decoder_fits(model, parallel, seq_length)
    if model.fp8_format is not None:
        check_fp8_fits(model, parallel)
    plan_stages(parallel, model.num_layers)
    check_depths_fit(model, parallel)
    if seq_length is not None:
        if parallel.sequence_parallel:
            divides(tp, seq_length, "tensor_model_parallel_size (with sequence_parallel)", "seq_length")
        if cp > 1:
            divides(
                2 * cp * (tp if parallel.sequence_parallel else 1),
                seq_length,
                "2*cp (times tp with sequence_parallel)",
                "seq_length",
            )
        if model.position_embedding_type == "learned_absolute":
            require(
                seq_length <= model.max_position_embeddings,
                f"seq_length ({seq_length}) is longer than max_position_embeddings ({model.max_position_embeddings})",
                "raise max_position_embeddings, shorten the sequence, or use position_embedding_type=rope",
            )


def check_heads_fit(model: TransformerConfig, tp: int) -> None:
    """Check that each rank of tp gets whole heads of attention, or a part of a group's rows.

    Raises:
        ConfigError: they cannot be cut so.
    """
    divides(tp, model.num_attention_heads, "tensor_model_parallel_size", "num_attention_heads")
    groups = model.num_query_groups
    if model.qk_layernorm_over_heads and groups < tp:
        raise ConfigError(
            f"qk_layernorm_over_heads with num_query_groups ({groups}) < tensor_model_parallel_size ({tp}): "
            "a key head would be on several ranks, and count several times in the norm over all",
            fix=f"tensor_model_parallel_size of at most {groups}",
        )
    if groups % tp and tp % groups:
        raise ConfigError(
            f"num_query_groups ({groups}) and tensor_model_parallel_size ({tp}) do not divide each other",
            fix="choose one that is a multiple of the other, so that each rank holds whole groups or a part of one",
        )
    if groups < tp:  # a rank's share of the packed rows is then only a part of a group
        rows = model.packed_heads * model.kv_channels
        divides(tp, rows, "tensor_model_parallel_size", "(num_attention_heads + 2 num_query_groups) * kv_channels")


def check_context_fits(model: TransformerConfig, parallel: ParallelConfig) -> None:
    """Check context parallelism against the model; the length of the sequence is checked by `check_model_fits`.

    Raises:
        ConfigError: the heads cannot be cut over the all-to-all, or the attention backend cannot attend to some of the
            keys.
    """
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if cp == 1:
        return
    inner, outer = parallel.context_parallel_factors
    heads = model.num_attention_heads // tp
    require(
        heads % inner == 0 or not model.has("self_attention"),
        f"cp_comm_type {parallel.cp_comm_type} deals a tp rank's {heads} query heads out to {inner} ranks",
        f"num_attention_heads / tp must be a multiple of {inner}; or choose cp_comm_type p2p or allgather",
    )
    backend = model.attention_backend
    require(
        backend != "te",
        "attention_backend te with context_parallel_size > 1: Transformer Engine would cut the sequence its own way",
        "choose attention_backend sdpa",
    )
    if outer == 1:
        return
    require(
        backend != "flash",
        f"attention_backend flash with cp_comm_type {parallel.cp_comm_type}: the package has no attention over some of "
        "the keys",
        "choose attention_backend sdpa, which is FlashAttention-2 on a GPU, or cp_comm_type a2a",
    )
    require(
        model.attention_dropout == 0.0,
        f"attention_dropout={model.attention_dropout} with cp_comm_type {parallel.cp_comm_type}: no rank holds a whole "
        "row of weights to draw a mask for",
        "choose attention_dropout=0, or cp_comm_type a2a",
    )


def check_fp8_fits(model: TransformerConfig, parallel: ParallelConfig) -> None:
    """Check the sizes of the matrices that FP8 multiplies, on a rank of tp.

    Raises:
        ConfigError: the recipe does not allow a size.
    """
    tp, d = parallel.tensor_model_parallel_size, model.kv_channels
    heads, qkv = model.num_attention_heads // tp, model.packed_heads * d // tp
    dims = {"hidden_size": model.hidden_size}
    if model.has("mlp"):
        dims["ffn_hidden_size / tp"] = model.ffn_hidden_size // tp
    if model.num_experts is not None:
        dims["moe_ffn_hidden_size / etp"] = model.moe_ffn_hidden_size // parallel.expert_tensor_parallel_size
    if (
        model.has("self_attention") and not model.multi_latent_attention
    ):  # else the layers themselves check, when they are built
        dims |= {"rows of q, k, v / tp": qkv, "num_attention_heads * kv_channels / tp": heads * d}
    check_fp8_dims(model.fp8_recipe, "FP8", **dims)


def check_experts_fit(model: TransformerConfig, parallel: ParallelConfig) -> None:
    """Check a model's experts against the layout.

    Raises:
        ConfigError: the experts cannot be divided evenly, or tokens would be counted twice.
    """
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    tp = parallel.tensor_model_parallel_size
    if model.num_experts is None:
        require(ep == 1, f"expert_model_parallel_size is {ep}, and the model has no experts", "1, or give num_experts")
        return
    divides(ep, model.num_experts, "expert_model_parallel_size", "num_experts")
    divides(etp, model.moe_ffn_hidden_size, "expert_tensor_parallel_size", "moe_ffn_hidden_size")
    if model.moe_shared_expert_intermediate_size is not None:
        size = model.moe_shared_expert_intermediate_size
        divides(tp, size, "tensor_model_parallel_size", "moe_shared_expert_intermediate_size")
    require(
        tp == 1 or parallel.sequence_parallel,
        f"experts with tensor_model_parallel_size={tp} and no sequence_parallel: all {tp} ranks would route the same "
        "tokens, and every expert would see each of them more than once",
        "--sequence-parallel",
    )
    require(
        not parallel.variable_seq_lengths or model.moe_token_dispatcher_type == "alltoall" or ep * etp == 1,
        "moe_token_dispatcher_type allgather with variable_seq_lengths: it needs as many tokens on every rank",
        "moe_token_dispatcher_type=alltoall",
    )


def check_depths_fit(model: TransformerConfig, parallel: ParallelConfig) -> None:
    """Check that a written-out layout has all depths of multi-token prediction on the last stage, or none.

    Raises:
        ConfigError: it has another number of them.
    """
    layout, depths = parallel.pipeline_model_parallel_layout, model.mtp_num_layers or 0
    written = expand_layout(layout).count("m") if layout else 0
    require(
        written in (0, depths),
        f"pipeline_model_parallel_layout {layout!r} has {written} m, mtp_num_layers is {model.mtp_num_layers}",
        f"{depths} m before the L, or none: they stand there anyway",
    )
