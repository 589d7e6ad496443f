"""Options that were given and change nothing in this run, each with the reason.

The problem in a sentence: a user gives `--yarn-beta-fast 16` and forgets `--rope-scaling-type yarn`; the run trains
to the end, and nothing says that the option was never read.

A field is read under a condition, and the conditions are data: a row names fields and says when they count. What was
given and does not count becomes a line of the run's first output. It is no error: in published command lines such
options are frequent, and the numbers are those of the same line without them. Combinations that contradict each other
are errors, and are refused where the fields are (`config/`).

| given                                   | counts only                           |
|-----------------------------------------|---------------------------------------|
| `lr_wsd_*`                              | with `lr_decay_style WSD`             |
| `loss_scale`, `hysteresis` and the like | with `params_dtype fp16`              |
| `yarn_*`, llama3's factors              | with that `rope_scaling_type`         |
| RoPE's base, share and scaling          | where positions are angles            |
| ...                                     | the rows below                        |

Megatron-LM reads such options in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from minimegatron.config import DataConfig
from minimegatron.config.variants import ExpertFields
from minimegatron.training.run import RunConfig


def per_split(data: DataConfig) -> bool:
    """Whether each set has files of its own."""
    return bool(data.train_data_path or data.valid_data_path or data.test_data_path)


def has_validation_set(data: DataConfig) -> bool:
    """Whether the run is given one."""
    if data.mock_data:
        return True
    from minimegatron.data.builder import parse_split  # not above: --help needs no torch

    return bool(data.valid_data_path) if per_split(data) else parse_split(data.split)[1] is not None


class Row(NamedTuple):
    """Fields that count under a condition.

    Attributes:
        fields: names in `config/`.
        counts: whether they are read in this run.
        condition: the same in words.
    """

    fields: str
    counts: Callable[[RunConfig], bool]
    condition: str


OF_EXPERTS = " ".join(field.name for field in dataclasses.fields(ExpertFields) if field.name != "num_experts")
ROWS = (
    Row(
        "rotary_base rotary_percent rotary_interleaved rope_scaling_type",
        lambda run: run.model.rotates,
        "position_embedding_type is rope or mrope",
    ),
    Row("rotary_percent kv_channels num_query_groups", lambda run: not run.model.multi_latent_attention,
        "attention is not multi_latent_attention, whose heads are sized by qk_head_dim and its relatives"),
    Row("rope_scaling_factor", lambda run: run.model.rotates and run.model.rope_scaling_type != "none",
        "rope_scaling_type is linear, llama3 or yarn"),
    Row("rope_scaling_low_freq_factor rope_scaling_high_freq_factor",
        lambda run: run.model.rotates and run.model.rope_scaling_type == "llama3", "rope_scaling_type is llama3"),
    Row("rope_scaling_original_max_position_embeddings",
        lambda run: run.model.rotates and run.model.rope_scaling_type in ("llama3", "yarn"),
        "rope_scaling_type is llama3 or yarn"),
    Row("yarn_beta_fast yarn_beta_slow yarn_mscale yarn_mscale_all_dim yarn_correction_range_round_to_int",
        lambda run: run.model.rotates and run.model.rope_scaling_type == "yarn", "rope_scaling_type is yarn"),
    Row("fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad",
        lambda run: run.model.fp8_format is not None, "fp8_format is given"),
    Row("fp8_margin fp8_amax_history_len fp8_amax_compute_algo",
        lambda run: run.model.fp8_format is None or run.model.fp8_recipe == "delayed", "fp8_recipe is delayed"),
    Row("num_layers_at_start_in_bf16 num_layers_at_end_in_bf16", lambda run: run.model.first_last_layers_bf16,
        "first_last_layers_bf16 is given"),
    Row("mtp_loss_scaling_factor", lambda run: run.model.mtp_num_layers is not None, "mtp_num_layers is given"),
    Row("recompute_method recompute_num_layers", lambda run: run.model.recompute_granularity == "full",
        "recompute_granularity is full"),
    Row("recompute_modules", lambda run: run.model.recompute_granularity == "selective",
        "recompute_granularity is selective"),
    Row("moe_router_bias_update_rate", lambda run: run.model.moe_router_enable_expert_bias,
        "moe_router_enable_expert_bias is given"),
    Row("moe_token_drop_policy", lambda run: run.model.moe_expert_capacity_factor is not None,
        "moe_expert_capacity_factor is given"),
    Row("cp_comm_type", lambda run: run.parallel.context_parallel_size > 1, "context_parallel_size is above 1"),
    Row("pipeline_schedule variable_seq_lengths", lambda run: run.parallel.pipeline_model_parallel_size > 1,
        "pipeline_model_parallel_size is above 1"),
    Row(f"expert_tensor_parallel_size {OF_EXPERTS}", lambda run: run.model.num_experts is not None,
        "num_experts is given"),
    Row("overlap_grad_reduce", lambda run: not run.parallel.use_torch_fsdp2,
        "use_torch_fsdp2 is not given: it overlaps by itself"),
    Row("lr_warmup_iters lr_warmup_samples", lambda run: run.optimizer.lr_warmup_fraction is None,
        "lr_warmup_fraction is not given"),
    Row("lr_wsd_decay_style lr_wsd_decay_iters", lambda run: run.optimizer.lr_decay_style == "WSD",
        "lr_decay_style is WSD"),
    Row("start_weight_decay end_weight_decay", lambda run: run.optimizer.weight_decay_incr_style != "constant",
        "weight_decay_incr_style is linear or cosine"),
    Row("adam_beta1 adam_beta2 adam_eps", lambda run: run.optimizer.optimizer != "sgd", "optimizer is adam or muon"),
    Row("muon_momentum muon_use_nesterov muon_split_qkv muon_scale_mode muon_extra_scale_factor muon_num_ns_steps "
        "muon_coefficient_type muon_fp32_matmul_prec muon_tp_mode",
        lambda run: run.optimizer.has_matrices, "optimizer is muon or dist_muon"),
    Row("muon_tp_mode", lambda run: run.parallel.tensor_model_parallel_size > 1,
        "tensor_model_parallel_size is above 1"),
    Row("sgd_momentum", lambda run: run.optimizer.optimizer == "sgd", "optimizer is sgd"),
    Row("use_precision_aware_optimizer", lambda run: not run.optimizer.optimizer_cpu_offload,
        "optimizer_cpu_offload is not given: it keeps fp32 on both sides"),
    Row("store_param_remainders",
        lambda run: run.optimizer.use_precision_aware_optimizer and run.optimizer.main_params_dtype == "fp32"
        and run.model.params_dtype == "bf16" and not run.parallel.use_torch_fsdp2,
        "use_precision_aware_optimizer keeps fp32 main parameters of bf16 weights"),
    Row("optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d use_torch_optimizer_for_cpu_offload pin_cpu_grads "
        "pin_cpu_params", lambda run: run.optimizer.optimizer_cpu_offload, "optimizer_cpu_offload is given"),
    Row("loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        lambda run: run.model.params_dtype == "fp16", "params_dtype is fp16"),
    Row("initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        lambda run: run.optimizer.loss_scale is None, "the loss scale is dynamic, and loss_scale makes it constant"),
    Row("eval_iters", lambda run: run.training.eval_interval is not None, "eval_interval is given"),
    Row("eval_interval eval_iters", lambda run: has_validation_set(run.data),
        "there is a validation set: a second share of --split, or --valid-data-path"),
    Row("eval_interval", lambda run: run.training.eval_iters > 0, "eval_iters is above 0"),
    Row("save_keep_best",
        lambda run: run.training.eval_interval is not None and run.training.eval_iters > 0
        and has_validation_set(run.data),
        "the run is evaluated: eval_interval and a validation set"),
    Row("split", lambda run: not run.data.mock_data and not per_split(run.data),
        "one --data-path or --corpus is cut into train, validation and test documents"),
    Row("wandb_exp_name wandb_entity wandb_save_dir", lambda run: run.training.wandb_project is not None,
        "wandb_project is given"),
    Row("cuda_graph_scope cuda_graph_warmup_steps", lambda run: run.training.cuda_graph_impl != "none",
        "cuda_graph_impl is local"),
    Row("profile_step_start profile_step_end profile_ranks profile_dir", lambda run: run.training.profile,
        "profile is given"),
    Row("corpus_path", lambda run: run.data.corpus is not None, "corpus is given"),
)  # fmt: skip


def counts(field: str, run: RunConfig) -> bool:
    """Whether a field is read in this run."""
    return all(row.counts(run) for row in ROWS if field in row.fields.split())


def without_effect(run: RunConfig, chosen: frozenset[str]) -> tuple[str, ...]:
    """One line for each option that was chosen on purpose and is not read.

    Args:
        run: the configuration.
        chosen: fields that the command line named, or a file with another value than the default, for the first line of
            a log has every field; a preset's are not reported, it is a model as published.

    Returns:
        Sentences; () where everything counts.
    """
    lines: dict[str, str] = {}
    for row in ROWS:
        if not row.counts(run):
            for field in row.fields.split():
                if field in chosen:
                    flag = "--" + field.replace("_", "-")
                    lines.setdefault(field, f"{flag} changes nothing in this run: it counts only where {row.condition}")
    return tuple(lines.values())
