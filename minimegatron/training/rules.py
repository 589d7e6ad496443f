"""Every rule between the five configurations of a run, and the number of ranks.

The same `check_run` is called before any process group exists, for a command line, and again when the trainer is built.
"""

from __future__ import annotations

import importlib.util

from minimegatron.comm.mesh import check_grids_agree
from minimegatron.config import DataConfig, ParallelConfig, TrainingConfig
from minimegatron.config.fits import check_model_fits
from minimegatron.config.precision import check_fp8_dims
from minimegatron.config.stages import plan_stages
from minimegatron.data.builder import parse_data_path, parse_split
from minimegatron.errors import ConfigError, require
from minimegatron.layers.attention.choice import check_backend
from minimegatron.layers.transformer_engine import check_transformer_engine
from minimegatron.models.chunks import schedule_of
from minimegatron.training.flops import step_flops
from minimegatron.training.microbatches import BatchSizeRampup, NumMicrobatches, rates_of
from minimegatron.training.run import RunConfig

TWIN_FLOPS = 2e12  # of a batch on one rank: minutes on a core


def check_run(run: RunConfig, world_size: int, *, reads: bool = True) -> None:
    """Every rule between the five configurations and the number of ranks.

    Args:
        run: the configurations.
        world_size: how many ranks there are.
        reads: whether the run reads data, and so needs some.

    Raises:
        ConfigError: the first rule that is broken.
    """
    dp = run.parallel.data_parallel_size(world_size)
    check_grids_agree(run.parallel, world_size)
    check_model_fits(run.model, run.parallel, run.data.seq_length)
    check_backend(run.model.attention_backend)
    check_transformer_engine(run.model, run.parallel)
    if run.model.fp8_format is not None:
        tokens = run.data.seq_length // run.parallel.context_parallel_size * run.training.micro_batch_size
        check_fp8_dims(run.model.fp8_recipe, "a microbatch", tokens=tokens)
    check_optimizer(run)
    sizes = batch_sizes(run.training, dp)
    check_schedules(run, sizes)
    rates_of(run.optimizer, run.training, sizes)
    check_profile(run.training, world_size)
    check_graphs(run)
    require(
        not (run.parallel.use_torch_fsdp2 and run.model.params_dtype == "fp16"),
        "use_torch_fsdp2 with params_dtype fp16: torch keeps the shards in fp32, and no loss scale would be made",
        "--bf16, or --data-parallel-sharding-strategy optim_grads_params in place of --use-torch-fsdp2",
    )
    require(
        run.training.bad_step != "rollback"
        or (run.checkpoint.save is not None and run.checkpoint.save_optim and run.checkpoint.save_rng),
        "bad_step rollback without a folder of whole checkpoints to go back to",
        "--save FOLDER --save-interval N, without --no-save-optim and --no-save-rng",
    )
    check_twin(run, dp)
    if run.training.train_samples is not None and "train_iters" in run.given:
        raise ConfigError("both --train-iters and --train-samples are given", fix="give one of them")
    if run.training.wandb_project and importlib.util.find_spec("wandb") is None:
        raise ConfigError("--wandb-project needs the wandb package", fix="pip install wandb, or drop the flag")
    data = run.data
    if reads and not any((data.data_path, data.train_data_path, data.data_args_path, data.mock_data, data.corpus)):
        raise ConfigError("no data is given", fix="--data-path PREFIX, --corpus stdlib (no file needed) or --mock-data")
    if reads:
        check_data(data)


def check_data(data: DataConfig) -> None:
    """What can be said of the words of the data before a file is opened.

    Raises:
        ConfigError: shares or weights that are none.
    """
    paths = [data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path]
    parse_split(data.split)
    for words in filter(None, paths):
        parse_data_path(words)


def check_profile(training: TrainingConfig, world_size: int) -> None:
    """A profile that is asked for has ranks, and steps.

    Raises:
        ConfigError: no rank or no step would be profiled.
    """
    if not training.profile:
        return
    absent = [rank for rank in training.profile_ranks if not 0 <= rank < world_size]
    if absent or not training.profile_ranks:
        raise ConfigError(
            f"profile_ranks {' '.join(map(str, training.profile_ranks))} of {world_size} ranks",
            fix=f"choose among 0 to {world_size - 1}",
        )
    if training.train_samples is None and training.profile_step_start >= training.train_iters:
        raise ConfigError(
            f"profile_step_start={training.profile_step_start}, and the run has {training.train_iters} steps",
            fix=f"--profile-step-start below {training.train_iters}",
        )


def check_optimizer(run: RunConfig) -> None:
    """What the optimizer needs of the layout.

    Raises:
        ConfigError: naming the two.
    """
    config, strategy = run.optimizer, run.parallel.data_parallel_sharding_strategy
    require(
        strategy == "no_shard" or not config.has_matrices,
        f"optimizer={config.optimizer!r} with data_parallel_sharding_strategy={strategy!r}: Muon needs whole matrices, "
        "and a shard is a range of a buffer",
        "--optimizer dist_muon and no sharding: each replica keeps the state of some whole matrices",
    )
    fsdp2, dtype = run.parallel.use_torch_fsdp2, run.model.params_dtype
    require(
        config.main_params_dtype == "fp32" or (dtype != "fp32" and not fsdp2),
        f"main_params_dtype={config.main_params_dtype!r} with "
        f"{'use_torch_fsdp2, whose shards are in fp32' if fsdp2 else 'params_dtype fp32'}: a weight is its own main "
        "parameter",
        "drop --main-params-dtype, or --bf16 with the distributed optimizer",
    )
    require(
        config.main_grads_dtype == "fp32" or (dtype == "bf16" and not fsdp2),
        f"main_grads_dtype={config.main_grads_dtype!r} with "
        f"{'use_torch_fsdp2, which sums in fp32' if fsdp2 else f'params_dtype {dtype}'}: gradients would be rounded "
        "below the dtype in which they are computed",
        "drop --main-grads-dtype, or --bf16 with the distributed optimizer",
    )


def check_graphs(run: RunConfig) -> None:
    """What the passes of a recorded step cannot have.

    Raises:
        ConfigError: naming it.
    """
    if run.training.cuda_graph_impl == "none":
        return
    require(
        run.training.cuda_graph_impl == "local",
        "cuda_graph_impl transformer_engine: its graphs are of single layers, and are not here",
        "--cuda-graph-impl local",
    )
    model, parallel, data = run.model, run.parallel, run.data
    found = {
        **_messages(parallel),
        "hidden_dropout or attention_dropout": model.hidden_dropout > 0 or model.attention_dropout > 0,
        "num_experts": model.num_experts is not None,
        "recompute_granularity": model.recompute_granularity is not None,
        "params_dtype fp16": model.params_dtype == "fp16",
        "transformer_impl transformer_engine": model.transformer_impl == "transformer_engine",
        "rampup_batch_size": run.training.rampup_batch_size is not None,
        "documents (reset_attention_mask, sequence_packing)": data.reset_attention_mask or data.sequence_packing,
    }
    used = [name for name, wanted in found.items() if wanted]
    require(
        not used,
        f"cuda_graph_impl local with {', '.join(used)}: a recorded step has one shape, no messages, no generators and "
        "no decision of the host in it",
        "drop it, or --cuda-graph-impl none",
    )


def check_twin(run: RunConfig, dp: int) -> None:
    """What `check_first_step` cannot compare with one process, or only in minutes.

    Raises:
        ConfigError: naming it.
    """
    if not run.training.check_first_step:
        return
    model = run.model
    found = {
        "fp8_format": model.fp8_format is not None,
        "transformer_impl transformer_engine": model.transformer_impl == "transformer_engine",
        "moe_expert_capacity_factor": model.moe_expert_capacity_factor is not None,
        "moe_input_jitter_eps": model.moe_input_jitter_eps is not None,
    }
    used = [name for name, wanted in found.items() if wanted]
    require(
        not used,
        f"check_first_step with {', '.join(used)}: one process rounds, drops or draws other numbers",
        "drop it for the check: --check-first-step --train-iters 1",
    )
    batch = batch_sizes(run.training, dp).global_batch_size_at(0)
    flops = step_flops(model, batch, run.data.seq_length)
    require(
        flops <= TWIN_FLOPS,
        f"check_first_step: {batch} samples of {run.data.seq_length} tokens are {flops:.1e} FLOP in fp64 on one rank, "
        f"while the others wait; the limit is {TWIN_FLOPS:.0e}",
        "check a smaller --global-batch-size, --seq-length or --num-layers: mistakes of a layout do not need size",
    )


def _messages(parallel: ParallelConfig) -> dict[str, bool]:
    sizes = ("tensor_model", "pipeline_model", "context", "expert_model")
    found = {f"{x}_parallel_size": getattr(parallel, f"{x}_parallel_size") > 1 for x in sizes}
    strategy = parallel.data_parallel_sharding_strategy
    return found | {
        "overlap_grad_reduce": parallel.overlap_grad_reduce,
        "overlap_param_gather": parallel.overlap_param_gather,
        "use_torch_fsdp2": parallel.use_torch_fsdp2,
        f"data_parallel_sharding_strategy {strategy}": strategy not in ("no_shard", "optim"),
    }


def check_schedules(run: RunConfig, sizes: NumMicrobatches) -> None:
    """The pipeline's schedule exists for every number of microbatches that the run will have.

    Their rules are about the smallest number, and about what is left over when groups of N are filled, so one number
    for each remainder is tried.

    Raises:
        ConfigError: the schedule's rule, and what would keep it.
    """
    if run.parallel.pipeline_model_parallel_size > 1:
        plan = plan_stages(run.parallel, run.model.num_layers)
        group = run.parallel.microbatch_group_size_per_virtual_pipeline_stage or plan.ranks
        smallest = {number % group: number for number in reversed(sizes.all())}
        for num_microbatches in smallest.values():
            schedule_of(plan, run.parallel, num_microbatches)


def batch_sizes(training: TrainingConfig, dp: int) -> NumMicrobatches:
    """How the global batch is cut, over the whole run.

    Raises:
        ConfigError: a batch size of the run is no multiple of micro_batch_size * dp.
    """
    final = training.global_batch_size or training.micro_batch_size * dp
    rampup = BatchSizeRampup(*training.rampup_batch_size) if training.rampup_batch_size else None
    return NumMicrobatches(final, training.micro_batch_size, dp, rampup, training.decrease_batch_size_if_needed)
