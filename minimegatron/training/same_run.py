"""Whether a run that goes on is the run that ended: every field of a run, and who compares it.

The problem in a sentence: a checkpoint is loaded with another seed, split or sequence length, the counter says 80,000
samples, and the run goes on without a word on samples that have nothing to do with those 80,000.

| fields      | where weights alone are taken (`--finetune`) | where the run goes on                                |
|-------------|----------------------------------------------|------------------------------------------------------|
| `MODEL`     | equal to the checkpoint's                    | equal to the checkpoint's                            |
| `RUN`       | free: another run begins                     | equal to the checkpoint's                            |
| `ELSEWHERE` | free                                         | equal in what they lead to: files, ids, batches, ... |
| `HARMLESS`  | free                                         | free, each for the reason that stands beside it      |

A field that nothing reads in this run (`without_effect`) is not compared, nor is the optimizer where its state is not
taken (`--no-load-optim`). `--override-checkpoint-args` takes this run's
values, and the log names each with both. What a checkpoint does not say, because it is older or was converted, cannot
be compared; the log names it.

Megatron-LM compares a few sizes of the model (`check_checkpoint_args` in `megatron/training/checkpointing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minimegatron.errors import CheckpointError
from minimegatron.training.run import SECTIONS, RunConfig
from minimegatron.training.without_effect import counts

if TYPE_CHECKING:
    from minimegatron.training.trainer import Trainer

# What the weights mean.
MODEL = frozenset(
    """
    num_layers hidden_size num_attention_heads vocab_size max_position_embeddings num_query_groups kv_channels
    ffn_hidden_size normalization layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm add_bias_linear
    add_qkv_bias activation untie_embeddings_and_output_weights position_embedding_type rotary_base rotary_percent
    rotary_interleaved mrope_section mrope_interleaved rope_scaling_type rope_scaling_factor
    rope_scaling_low_freq_factor rope_scaling_high_freq_factor rope_scaling_original_max_position_embeddings
    yarn_beta_fast yarn_beta_slow yarn_mscale yarn_mscale_all_dim yarn_correction_range_round_to_int sliding_window
    params_dtype fp32_residual_connection num_experts moe_layer_freq moe_ffn_hidden_size
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk moe_router_score_function
    moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
    moe_router_enable_expert_bias moe_router_dtype moe_router_load_balancing_type moe_expert_capacity_factor
    moe_pad_expert_input_to_capacity moe_token_drop_policy multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim
    qk_pos_emb_head_dim v_head_dim mtp_num_layers fp8_format fp8_recipe fp8_margin fp8_amax_history_len
    fp8_amax_compute_algo fp8_wgrad tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16
    num_layers_at_end_in_bf16
    """.split()
)

# What makes the next step another one.
RUN = frozenset(
    """
    seed seq_length global_batch_size mock_data reset_position_ids reset_attention_mask eod_mask_loss sequence_packing
    hidden_dropout attention_dropout moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate
    moe_input_jitter_eps mtp_loss_scaling_factor
    optimizer adam_beta1 adam_beta2 adam_eps sgd_momentum clip_grad decoupled_lr decoupled_min_lr
    apply_wd_to_qk_layernorm param_groups freeze muon_momentum muon_use_nesterov muon_split_qkv muon_scale_mode
    muon_extra_scale_factor muon_num_ns_steps muon_coefficient_type muon_fp32_matmul_prec muon_tp_mode
    main_params_dtype main_grads_dtype exp_avg_dtype exp_avg_sq_dtype
    loss_scale min_loss_scale loss_scale_window hysteresis
    """.split()
)

# Fields that are compared by what they lead to.
ELSEWHERE = {
    "data_path train_data_path data_args_path split corpus": "training data: the files' contents, shares, documents",
    "tokenizer_type tokenizer_model vocab_file merge_file": "tokenizer: which text has which ids",
    "rampup_batch_size decrease_batch_size_if_needed": "global_batch_size: all sizes that the run has",
    "lr min_lr weight_decay start_weight_decay end_weight_decay weight_decay_incr_style lr_decay_style lr_decay_iters "
    "lr_warmup_iters lr_warmup_fraction lr_decay_samples lr_warmup_samples lr_warmup_init lr_wsd_decay_style "
    "lr_wsd_decay_iters": "the schedule compares itself (`optim/schedule`), and has flags of its own",
    "sample_order": "an order goes on as it began (`training/datasets`)",
}

# Fields that may be others, and why that leaves the run what it is.
HARMLESS = {
    "train_iters train_samples exit_interval exit_duration_in_mins":
        "how long a run is changes no step of it; where the schedule follows from the length, the schedule compares it",
    "micro_batch_size": "a batch may be cut anyhow: sums are divided once, by the tokens of all of it",
    "attention_backend transformer_impl kernels recompute_granularity recompute_method recompute_num_layers "
    "recompute_modules moe_token_dispatcher_type moe_grouped_gemm moe_shared_expert_overlap "
    "cuda_graph_impl cuda_graph_scope cuda_graph_warmup_steps distributed_backend":
        "how the same numbers are computed",
    "make_vocab_size_divisible_by": "padding of the vocabulary is no part of the model",
    "init_method_std scale_output_init initial_loss_scale": "the beginning is over",
    "use_precision_aware_optimizer store_param_remainders optimizer_cpu_offload optimizer_offload_fraction "
    "overlap_cpu_optimizer_d2h_h2d use_torch_optimizer_for_cpu_offload pin_cpu_grads pin_cpu_params":
        "where the optimizer's numbers are kept, in dtypes that are compared",
    "valid_data_path test_data_path eval_interval eval_iters": "an evaluation leaves no trace in the training",
    "corpus_path data_cache_path": "where files lie; what they hold is compared",
    "check_for_nan_in_loss_and_grad bad_step spiky_loss_factor":
        "what to do at a bad step is decided when it comes, often by going on with another answer",
    "log_num_zeros_in_grad log_interval tensorboard_dir wandb_project wandb_exp_name wandb_entity wandb_save_dir "
    "log_file check_replicas_interval check_first_step profile use_pytorch_profiler profile_step_start "
    "profile_step_end profile_ranks profile_dir log_memory_interval log_memory_to_tensorboard record_memory_history "
    "memory_snapshot_path":
        "what is observed and where it is written",
}  # fmt: skip
LAYOUT = "a checkpoint is regions of whole tensors, and every layout adds up the same numbers"
CHECKPOINT = "where, when and which checkpoints are written and read"
HARMLESS[" ".join(SECTIONS["parallel"].__dataclass_fields__)] = LAYOUT
HARMLESS[" ".join(SECTIONS["checkpoint"].__dataclass_fields__)] = CHECKPOINT

_FREE = frozenset(" ".join(HARMLESS).split())
OF_OPTIMIZER = SECTIONS["optimizer"].__dataclass_fields__.keys()
FACTS = {"training data", "tokenizer"}
SHOWN = 3  # differences in an error
NOTHING = "nothing"  # where a checkpoint has a fact that this run does not


def fields_of(run: RunConfig) -> dict[str, Any]:
    """Every field of a run that is compared by its value; as JSON has it."""
    found = {name: value for section in SECTIONS for name, value in getattr(run, section).to_dict().items()}
    found = {name: value for name, value in found.items() if name in RUN | MODEL}
    if run.spec is not None:
        found["spec"] = " ".join(run.spec)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def facts_of(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint says of its run: fields, and what the others lead to."""
    sizes, data = trainer.batch_sizes, trainer.data
    batches = [n * sizes.micro_batch_size * sizes.data_parallel_size for n in sizes.all()]
    return fields_of(trainer.run) | {
        "global_batch_size": [*batches, *([f"over {sizes.rampup.samples} samples"] if sizes.rampup else [])],
        "training data": [list(one) for one in data.trained_on],
        "tokenizer": data.tokenizer.identity,
    }


def compare(state: Mapping[str, Any], trainer: Trainer, weights_only: bool, new_optimizer: bool = False) -> str:
    """Hold a run against the checkpoint that it loads.

    Args:
        state: of the checkpoint's manifest.
        trainer: the run.
        weights_only: nothing but the weights is taken.
        new_optimizer: the run goes on, with an optimizer that begins.

    Returns:
        What the log should say: differences that are accepted, what could not be compared; or "".

    Raises:
        CheckpointError: it is another model's or another run's; names the differences with both values.
    """
    ours = facts_of(trainer)
    saved = {**({"seed": state["seed"]} if "seed" in state else {}), **state["model"], **state.get("run", {})}
    free = _FREE | (RUN | FACTS if weights_only else OF_OPTIMIZER if new_optimizer else set())
    if trainer.run.model.position_embedding_type != "learned_absolute":
        free |= {"max_position_embeddings"}  # no tensor has that size
    names = [name for name in (ours | saved) if name not in free and counts(name, trainer.run)]
    differs = [name for name in names if name in saved and _plain(saved[name]) != _plain(ours.get(name, NOTHING))]
    lines = [f"{name}: checkpoint {_shown(saved[name])}, now {_shown(ours.get(name, NOTHING))}" for name in differs]
    if differs and not trainer.run.checkpoint.override_checkpoint_args:
        what, other = "run", "--finetune to begin a new run with its weights"
        if MODEL.intersection(differs):
            what, other = "model", "--use-checkpoint-args for its model"
        more = f" (and {', '.join(differs[SHOWN : SHOWN + 8])})" if len(lines) > SHOWN else ""
        raise CheckpointError(
            f"the checkpoint is of another {what}:\n  " + "\n  ".join(lines[:SHOWN]) + more,
            fix=f"give the flags of the run that wrote it, or {other}; --override-checkpoint-args goes on all the same",
        )
    said = ["\n  ".join(["--override-checkpoint-args goes on with another run than the checkpoint's:", *lines])]
    unknown = [name for name in names if name not in saved]
    return "\n".join(
        (said if lines else []) + ([f"not in the checkpoint, so not compared: {', '.join(unknown)}"] if unknown else [])
    )


def _plain(value: Any) -> Any:
    """What is compared: of a file its contents, without its name."""
    return [one[0] for one in value] if isinstance(value, list) and value and isinstance(value[0], list) else value


def _shown(value: Any) -> str:
    """For a line of a message."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        shown = "; ".join(f"{name}, {contents}" for contents, name in value[:2])
        return shown + (f"; and {len(value) - 2} more files" if len(value) > 2 else "")
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else repr(value)
