"""The rules between the configurations of a run and the number of ranks.

Each configuration checks itself when it is made (`config/`). `check_run` is called for a command line before any
process group exists, so that a mistake costs a second, and by `build_trainer` for a run that a program made.
"""

from __future__ import annotations

import functools
import importlib.util
import os

from minimegatron.comm.mesh import check_grids_agree
from minimegatron.config import DataConfig, TrainingConfig
from minimegatron.config.fits import check_model_fits
from minimegatron.config.run import RunConfig
from minimegatron.config.stages import plan_stages
from minimegatron.config.variants import check_fp8_dims
from minimegatron.data.builder import parse_data_path, parse_split
from minimegatron.errors import require
from minimegatron.layers.attention.choice import check_backend
from minimegatron.layers.transformer_engine import check_transformer_engine
from minimegatron.models.chunks import schedule_of, stage_class
from minimegatron.training.flops import step_flops
from minimegatron.training.microbatches import BatchSizeRampup, NumMicrobatches, rates_of
from minimegatron.training.model_class import has_documents

TWIN_FLOPS = 2e12  # of a batch on one rank: minutes on a core


@functools.lru_cache(maxsize=8)  # the command line and `build_trainer` ask for the same run, in the same words
def check_run(run: RunConfig, world_size: int, *, reads: bool) -> None:
    """Check every rule between the configurations and the number of ranks.

    Args:
        run: the configurations.
        world_size: how many ranks there are.
        reads: whether the run reads data, so that some must be given.

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
    _check_optimizer(run)
    sizes = batch_sizes(run.training, dp)
    _check_schedules(run, sizes)
    rates_of(run.optimizer, run.training, sizes)
    require(
        run.training.train_samples is None or "train_iters" not in run.given,
        "both --train-iters and --train-samples are given",
        "give one of them",
    )
    require(
        run.model.lora_base is None or (run.checkpoint.load is not None and not run.parallel.use_torch_fsdp2),
        f"lora_base {run.model.lora_base}, and the run begins with no weights, or torch's FSDP2 shards them",
        "the same folder as --load, or the run that goes on; and another --data-parallel-sharding-strategy",
    )
    stage_class(run.model).check_run(run)  # that of `--spec` is asked where it is imported, by `build_replica`
    _check_profile(run.training, world_size)
    _check_graph(run)
    _check_twin(run, world_size)
    require(
        run.training.bad_step != "rollback"
        or (run.checkpoint.save is not None and run.checkpoint.save_optim and run.checkpoint.save_rng),
        "bad_step rollback without a folder of whole checkpoints to go back to",
        "--save FOLDER --save-interval N, without --no-save-optim and --no-save-rng",
    )
    for package in ("wandb", "trackio"):
        require(
            getattr(run.training, f"{package}_project") is None or importlib.util.find_spec(package) is not None,
            f"--{package}-project needs the {package} package",
            f"pip install {package}, or drop the flag",
        )
    if reads and run.task is None:
        _check_data(run.data)
    elif reads and run.task_name in ("sft", "vlm", "dpo", "reward", "distill"):
        _check_lines(run)
    elif run.task_name in ("grpo", "ppo"):
        _check_rollouts(run, sizes)


def _check_rollouts(run: RunConfig, sizes: NumMicrobatches) -> None:
    """A rollout is a whole number of steps, and its answers fit."""
    task, data = run.task, run.data
    answers, batch = task.grpo_prompts_per_step * task.grpo_group_size, sizes.global_batch_size
    require(
        answers * task.grpo_iterations % batch == 0 and sizes.rampup is None,
        f"a rollout of {task.grpo_prompts_per_step} * {task.grpo_group_size} = {answers} answers, learned from "
        f"{task.grpo_iterations} times, in steps of {batch}",
        f"a --global-batch-size that divides {answers * task.grpo_iterations}, without a ramp-up",
    )
    named = [
        name
        for name in ("data_path", "train_data_path", "data_args_path", "mock_data", "corpus")
        if getattr(data, name)
    ]
    require(not named, f"minimegatron grpo with {', '.join(named)}: an environment asks", "--environment NAME")
    _check_answers_fit(run)


def _check_answers_fit(run: RunConfig) -> None:
    """An answer that is drawn fits into a sample."""
    require(
        run.task.max_completion_length <= run.data.seq_length,
        f"max_completion_length {run.task.max_completion_length} is above seq_length {run.data.seq_length}",
        "a larger --seq-length, which holds the prompt as well",
    )


def _check_lines(run: RunConfig) -> None:
    """A task reads files of lines, or built-in examples."""
    data, named = run.data, f"minimegatron {run.task_name}"
    text = [name for name in ("data_args_path", "mock_data", "corpus") if getattr(data, name)]
    require(not text, f"{named} with {', '.join(text)}: that is text, not conversations", "--data-path FILE.jsonl")
    files = bool(data.data_path or data.train_data_path)
    require(files or run.task.examples, f"{named}: no data is given", "--data-path FILE.jsonl, or --examples NAME")
    require(not (files and run.task.examples), "files and --examples are given", "drop one of them")
    if run.task_name == "distill" and run.task.lmbda:
        require(
            not data.sequence_packing,
            f"sequence_packing with lmbda {run.task.lmbda}: how long the student's answers are is known when they are "
            "drawn, and rows are filled before",
            "drop --sequence-packing, or --lmbda 0",
        )
        _check_answers_fit(run)
    parse_split(data.split)
    for path in (*data.data_path, *data.train_data_path, *data.valid_data_path, *data.test_data_path):
        require(os.path.isfile(path), f"no such file: {path}", "lines of JSON; shares of files are not read here")


def _check_data(data: DataConfig) -> None:
    """A data source is given, and it is a path, or shares and paths."""
    require(
        any((data.data_path, data.train_data_path, data.data_args_path, data.mock_data, data.corpus)),
        "no data is given",
        "--data-path PREFIX, --corpus stdlib (no file needed) or --mock-data",
    )
    parse_split(data.split)
    for words in filter(None, (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)):
        parse_data_path(words)


def _check_profile(training: TrainingConfig, world_size: int) -> None:
    """A profile has ranks, and steps."""
    if not training.profile:
        return
    ranks, start = training.profile_ranks, training.profile_step_start
    require(
        bool(ranks) and all(0 <= rank < world_size for rank in ranks),
        f"profile_ranks {' '.join(map(str, ranks))} of {world_size} ranks",
        f"choose among 0 to {world_size - 1}",
    )
    require(
        training.train_samples is not None or start < training.train_iters,
        f"profile_step_start={start}, and the run has {training.train_iters} steps",
        f"--profile-step-start below {training.train_iters}",
    )


def _check_optimizer(run: RunConfig) -> None:
    """The optimizer works with the layout and with the model's dtype."""
    config, strategy = run.optimizer, run.parallel.data_parallel_sharding_strategy
    fsdp2, dtype = run.parallel.use_torch_fsdp2, run.model.params_dtype
    require(
        not (fsdp2 and dtype == "fp16"),
        "use_torch_fsdp2 with params_dtype fp16: torch keeps the shards in fp32, and no loss scale would be made",
        "--bf16, or --data-parallel-sharding-strategy optim_grads_params in place of --use-torch-fsdp2",
    )
    require(
        strategy == "no_shard" or not config.has_matrices,
        f"optimizer={config.optimizer!r} with data_parallel_sharding_strategy={strategy!r}: Muon needs whole matrices, "
        "and a shard is a range of a buffer",
        "--optimizer dist_muon and no sharding: each replica keeps the state of some whole matrices",
    )
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


def _check_graph(run: RunConfig) -> None:
    """The passes of a recorded step have one shape, no messages, no generators and no decision of the host."""
    if run.training.cuda_graph_impl == "none":
        return
    require(
        run.task is None,
        f"cuda_graph_impl with minimegatron {run.task_name}: documents and answers have other lengths in each step",
        "drop it",
    )
    model, parallel, data = run.model, run.parallel, run.data
    strategy = parallel.data_parallel_sharding_strategy
    sizes = [f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context", "expert_model")]
    cannot = {
        **{size: getattr(parallel, size) > 1 for size in sizes},
        "overlap_grad_reduce": parallel.overlap_grad_reduce,
        "overlap_param_gather": parallel.overlap_param_gather,
        "use_torch_fsdp2": parallel.use_torch_fsdp2,
        f"data_parallel_sharding_strategy {strategy}": strategy not in ("no_shard", "optim"),
        "hidden_dropout or attention_dropout": model.hidden_dropout > 0 or model.attention_dropout > 0,
        "num_experts": model.num_experts is not None,
        "recompute_granularity": model.recompute_granularity is not None,
        "params_dtype fp16": model.params_dtype == "fp16",
        "transformer_impl transformer_engine": model.transformer_impl == "transformer_engine",
        "rampup_batch_size": run.training.rampup_batch_size is not None,
        "documents (reset_attention_mask, sequence_packing, BERT's padding)": has_documents(run)
        or data.sequence_packing,
    }
    used = [name for name, is_used in cannot.items() if is_used]
    require(
        not used,
        f"cuda_graph_impl local with {', '.join(used)}: a recorded step has one shape, no messages, no generators and "
        "no decision of the host in it",
        "drop it, or --cuda-graph-impl none",
    )


def _check_twin(run: RunConfig, world_size: int) -> None:
    """`check_first_step` is possible."""
    if run.training.check_first_step:
        check_repeatable(run, "check_first_step", world_size)


def check_repeatable(run: RunConfig, name: str, world_size: int, alone: bool = True) -> None:
    """One run in fp64 can be compared with another, whose numbers depend on nothing but weights and samples.

    Args:
        run: the configuration.
        name: who compares.
        world_size: how many ranks there are.
        alone: the other run is that of one process, which has to compute the whole batch, in minutes.

    Raises:
        ConfigError: what cannot be repeated.
    """
    model = run.model
    cannot = {
        "fp8_format": model.fp8_format is not None,
        "transformer_impl transformer_engine": model.transformer_impl == "transformer_engine",
        "moe_expert_capacity_factor": alone and model.moe_expert_capacity_factor is not None,
        "moe_input_jitter_eps": model.moe_input_jitter_eps is not None,
        f"the task {run.task_name}, whose first batch needs more than a data set": run.task_name
        in ("grpo", "ppo", "distill"),
    }
    used = [text for text, is_used in cannot.items() if is_used]
    require(
        not used,
        f"{name} with {', '.join(used)}: one process rounds, drops or draws other numbers",
        "drop it for the check, which needs one step alone",
    )
    batch = batch_sizes(run.training, run.parallel.data_parallel_size(world_size)).global_batch_size_at(0)
    flops = step_flops(model, batch, run.data.seq_length)
    require(
        not alone or flops <= TWIN_FLOPS,
        f"{name}: {batch} samples of {run.data.seq_length} tokens are {flops:.1e} FLOP in fp64 on one rank, "
        f"while the others wait; the limit is {TWIN_FLOPS:.0e}",
        "check a smaller --global-batch-size, --seq-length or --num-layers: mistakes of a layout do not need size",
    )


def _check_schedules(run: RunConfig, sizes: NumMicrobatches) -> None:
    """The pipeline's schedule exists for every number of microbatches that the run will have.

    A schedule has rules for the smallest number and for the remainder of groups of N, so one number for each remainder
    is tried.
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
