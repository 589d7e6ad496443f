"""Builds the trainer of a run, and prints the run's banner: machine, data, model, number of steps.

All ranks build the parts in one order, because some parts communicate:

    mesh -> random streams -> data (rank 0 first) -> model -> DDP -> optimizer -> schedule -> observers -> checkpoint

Every mistake is reported before the first step: rules between the configurations by `rules.check_run`, the layout when
the mesh is built, the data when it is opened, the model when it is built.

Megatron-LM: `pretrain` and `setup_model_and_optimizer` in `megatron/training/training.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import torch

import minimegatron
from minimegatron.checkpoint.packed import BASE, contents_of_base, read_base
from minimegatron.comm.agree import on_all_ranks, on_rank_zero
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.random import RngStreams
from minimegatron.config.run import RunConfig
from minimegatron.config.stages import plan_stages
from minimegatron.data.builder import parse_split
from minimegatron.data.gpt_dataset import Dataset
from minimegatron.errors import DataError
from minimegatron.models.chunks import build_model_chunks, count_parameters, stage_class
from minimegatron.models.spec import spec_from_name
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.groups import freeze, train_added
from minimegatron.optim.schedule import OptimizerParamScheduler
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.parallel.data.ddp import data_parallel
from minimegatron.training.checkpointing import Checkpoints
from minimegatron.training.datasets import Joint, RunData, tokens_of
from minimegatron.training.graphs import step_graph
from minimegatron.training.loading import continues, keep_what_was_given
from minimegatron.training.memory_report import MemoryReport
from minimegatron.training.microbatches import NumMicrobatches, iterations_of, rates_of
from minimegatron.training.observers import Observer
from minimegatron.training.observers.checks import FirstStepCheck, ReplicaCheck
from minimegatron.training.observers.evaluation import Evaluation
from minimegatron.training.observers.metrics import EpochLines, Metrics
from minimegatron.training.observers.norms import Norms
from minimegatron.training.observers.profile import Profile
from minimegatron.training.observers.stragglers import Stragglers
from minimegatron.training.observers.timeline import Timeline
from minimegatron.training.rules import batch_sizes, check_run
from minimegatron.training.run_state import RunState
from minimegatron.training.same_run import facts_of
from minimegatron.training.step import ForwardStep
from minimegatron.training.task import Task
from minimegatron.training.trainer import Trainer

NAMED = 8  # files of a blend


def build_trainer(run: RunConfig, mesh: Mesh | None = None, task: type[Task] = Task, quiet: bool = False) -> Trainer:
    """Build the trainer of a run, ready to `train()`; all ranks call it together.

    Args:
        run: the configuration.
        mesh: the layout, if the caller has built it; default from `run.parallel` and the process group.
        task: its data and its loss; default pre-training.
        quiet: print nothing.

    Raises:
        ConfigError, DataError, CheckpointError: before anything is trained, on every rank.
    """
    started = time.monotonic()
    mesh = mesh if mesh is not None else Mesh.build(run.parallel)
    check_run(run, mesh.world.size, reads=True)
    sizes = batch_sizes(run.training, mesh.dp.size)
    train_iters = iterations_of(run.training, sizes)
    if mesh.rank == 0 and not quiet:
        print(describe_machine(run, mesh), flush=True)
    saved = continues(run.checkpoint, mesh)
    samples_wanted = _samples_wanted(run, sizes, saved)
    joint = _joint(run, sizes, saved, samples_wanted)
    learned = task(run)
    data = learned.load_data(run, mesh, samples_wanted, joint, quiet)
    run = dataclasses.replace(run, model=run.trained_model(data.vocab_size))
    if data.train is None:
        raise DataError("there is no training set", fix="--split with a first share above 0, or --train-data-path")
    state = build_state(run, mesh, sizes, data, joint)
    metrics = on_all_ranks(lambda: Metrics(run, train_iters, mesh, quiet), mesh.world)
    graph = on_all_ranks(lambda: step_graph(run, mesh.device), mesh.world)
    own = learned.begin(state, data, metrics.say)
    state.of_task = learned.tensors()
    observers = [*own, *_observers(state, data, data.train, sizes, train_iters, learned.forward_step, metrics)]
    evaluation = Evaluation(state, data, sizes, learned, metrics)
    samples = sizes.samples_of(train_iters)
    metrics.say(describe_run(run, train_iters, sizes))
    metrics.say(describe_data(run, data, data.train, samples))
    if metrics.peak is not None:
        metrics.say(f"MFU, below: of {metrics.peak:g} TFLOP/s, the dense bf16 peak of {metrics.device_name}")
    checkpoints = Checkpoints(run.checkpoint, state, metrics.say)
    checkpoints.begin_run(functools.partial(keep_what_was_given, run.checkpoint.load, data))
    return Trainer(
        state=state,
        data=data,
        train_set=data.train,
        batch_sizes=sizes,
        train_iters=train_iters,
        task=learned,
        graph=graph,
        metrics=metrics,
        evaluation=evaluation,
        checkpoints=checkpoints,
        observers=[*observers, evaluation, checkpoints],
        started=started,
    )


def build_state(run: RunConfig, mesh: Mesh, sizes: NumMicrobatches, data: RunData, joint: Joint) -> RunState:
    """Build random streams, model, DDP, optimizer and schedule of a new run.

    Args:
        run: with the vocabulary of its data.
        mesh: the layout.
        sizes: the batch sizes of the run.
        data: its data.
        joint: samples of each set whose epochs are shuffled together.
    """
    rng = RngStreams.on_mesh(run.training.seed, mesh)
    model = build_replica(run, mesh, rng)
    optimizer = build_optimizer(
        run.optimizer, model, mesh, model.shards(), kernels=run.model.kernels, publish=model.start_param_gather
    )
    schedule = functools.partial(rates_of, run.optimizer, run.training, sizes)
    before = functools.partial(schedule, counted=False)
    scheduler = OptimizerParamScheduler(optimizer.param_groups, schedule(), before)
    facts = facts_of(run, sizes, data)
    if (base := run.model.lora_base) is not None:
        facts[BASE] = on_rank_zero(lambda: contents_of_base(base), mesh.world)
    state = RunState(run, mesh, model, optimizer, scheduler, rng, facts=facts, joint=joint)
    if data.train is not None:
        state.tokens_of = functools.partial(tokens_of, data.train)
    return state


def build_replica(run: RunConfig, mesh: Mesh, rng: RngStreams | None = None) -> DataParallel:
    """Build this rank's part of the model of a run, initialised from its seed, in its data-parallel wrapper.

    Args:
        run: the model, its layer spec, its seed, and which parameters are frozen.
        mesh: the layout.
        rng: streams for dropout; None for a model that is not trained, whose parameters are all frozen.
    """
    spec = spec_from_name(run.spec, run.model)
    stage_class(run.model, spec).check_run(run)
    model = build_model_chunks(run.model, mesh, run.training.seed, spec, rng)
    on_all_ranks(lambda: read_base(model, run.model), mesh.world)
    if rng is None:
        model.requires_grad_(False)
    else:
        freeze(model, run.optimizer, mesh)
        if run.model.lora_rank is not None:
            train_added(model)
    return data_parallel(model, mesh, run.optimizer.grad_dtype)


def _observers(
    state: RunState,
    data: RunData,
    train_set: Dataset,
    sizes: NumMicrobatches,
    train_iters: int,
    forward_step: ForwardStep,
    metrics: Metrics,
) -> list[Observer]:
    """The observers that only watch; they are called before evaluation and checkpoints."""
    run, mesh, optimizer = state.run, state.mesh, state.optimizer
    assert optimizer is not None
    training = run.training

    def say(text: str) -> None:
        metrics.say(text)

    profile = on_all_ranks(lambda: Profile(training, mesh.rank, mesh.device), mesh.world)
    memory = on_all_ranks(lambda: MemoryReport(run, mesh, state.model, optimizer, say, metrics.write), mesh.world)
    if training.log_memory_to_tensorboard:
        metrics.more_tags = memory.tags
    metrics.epochs, metrics.owners = train_set.read_epochs, memory.bytes_held
    norms = Norms(optimizer, mesh, training, metrics.add)
    timeline = Timeline(mesh, training.log_timeline_interval, metrics.add, metrics.write)
    epochs = EpochLines(
        train_set, sizes.samples_of(train_iters), training.log_interval, say if metrics.speaks else None
    )
    replicas = ReplicaCheck(state.model, mesh, training.check_replicas_interval)
    stragglers = Stragglers(training, mesh, say, metrics.log)
    observers: list[Observer] = [epochs, norms, timeline, metrics, stragglers, memory, profile, replicas]
    if training.check_first_step:
        batch_size = sizes.global_batch_size_at(0)
        first = FirstStepCheck(run, mesh, train_set, batch_size, forward_step, say)
        observers.append(first)
    return observers


def _samples_wanted(run: RunConfig, sizes: NumMicrobatches, began: Mapping[str, Any] | None) -> tuple[int, int, int]:
    """Samples of the train, validation and test sets that the run can use."""
    evaluated = began["counters"]["consumed_valid_samples"] if began else 0
    train, valid, test = _samples_of(run, sizes, iterations_of(run.training, sizes))
    return train, valid + evaluated if valid else 0, test


def _samples_of(run: RunConfig, sizes: NumMicrobatches, train_iters: int) -> tuple[int, int, int]:
    batch, training = sizes.global_batch_size, run.training
    evaluations = train_iters // training.eval_interval + 1 if training.eval_interval else 0
    rounds = training.eval_iters * batch
    return train_iters * batch, evaluations * rounds, rounds if evaluations else 0


def _joint(
    run: RunConfig, sizes: NumMicrobatches, began: Mapping[str, Any] | None, wanted: tuple[int, int, int]
) -> Joint:
    """Samples whose epochs are shuffled together, as when the run began (`data/indices`).

    A checkpoint without this number is Megatron-LM's or of an older version. Its order is that of all samples of the
    run, whose length is given by the end of its weight decay schedule.
    """
    if began is None:
        return wanted if run.data.sample_order == "megatron" else (None, None, None)
    if "joint_samples" in began:
        train, valid, test = began["joint_samples"]
        return train, valid, test
    length = dataclasses.replace(run.training, train_samples=began["scheduler"]["wd_incr_steps"])
    return _samples_of(run, sizes, iterations_of(length, sizes))


def describe_machine(run: RunConfig, mesh: Mesh) -> str:
    """Lines of the banner that are known before the data is opened; building a large index takes a while."""
    sizes = [f"{name}{mesh.axis(name).size}" for name in ("tp", "cp", "pp", "dp") if mesh.axis(name).size > 1]
    layout = f"{mesh.world.size} rank{'s'[: mesh.world.size > 1]}{': ' if sizes else ''}{' '.join(sizes)}"
    layout += " with sequence parallelism" if run.parallel.sequence_parallel else ""
    data = run.data
    words = data.data_path or data.train_data_path or (data.data_args_path or "mock",)
    source = f"{data.corpus}, prepared once in {data.corpus_path}/" if data.corpus else " ".join(words)
    named = [value for name in ("examples", "environment") if (value := getattr(run.task, name, None))]
    source = ", ".join(named) or source
    lines = [
        *run.notes,
        f"minimegatron {minimegatron.__version__}, torch {torch.__version__}, {layout}, on {mesh.device.type}",
        f"data: {source}",
    ]
    return "\n".join(lines)


def describe_run(run: RunConfig, train_iters: int, batch_sizes: NumMicrobatches) -> str:
    """Lines of the banner about the model and the steps."""
    model = run.model
    heads = f"{model.num_attention_heads} heads over {model.num_query_groups} groups"
    if model.hybrid_override_pattern is not None:
        heads = model.hybrid_override_pattern
    lines = [
        f"model: {count_parameters(model) / 1e6:.2f} M parameters in {model.params_dtype}: {model.num_layers} layers, "
        f"h {model.hidden_size}, {heads}, f {model.ffn_hidden_size}, vocabulary {model.vocab_size}",
        f"run: {train_iters} steps of {batch_sizes.global_batch_size} samples of {run.data.seq_length} tokens, "
        f"in microbatches of {run.training.micro_batch_size}, {batch_sizes.at(0)} a rank",
    ]
    if run.parallel.pipeline_model_parallel_size > 1:
        plan = plan_stages(run.parallel, model.num_layers)
        counts = " ".join(str(len(layers)) for layers in plan.layers)
        lines.append(f"pipeline: {plan.schedule}, {len(plan.layers)} stages of {counts} layers on {plan.ranks} ranks")
    clip = run.optimizer.clip_grad
    cut = f"before it is clipped to {clip:g}" if clip else "which is not clipped"
    return "\n".join([*lines, f"grad norm, below: of the whole gradient, {cut}"])


def describe_data(run: RunConfig, data: RunData, train: Dataset, samples: int) -> str:
    """Lines of the banner about the epochs of the training data, and about evaluations that the run cannot do.

    Args:
        run: the configuration.
        data: the data.
        train: the training set.
        samples: samples of all steps.
    """
    read = train.read_epochs(samples)
    named = [f"{_number(n)} of {name}" for name, n in list(read.items())[:NAMED]]
    more = [f"{len(read) - NAMED} more files"] if len(read) > NAMED else []
    what = f"{_number(*read.values())} of its training data" if len(read) == 1 else ", ".join(named + more)
    lines = [f"epochs: the run reads {what}"]
    if run.training.eval_interval and run.training.eval_iters and run.task_name not in ("grpo", "ppo"):
        split = run.data.split
        if data.valid is None:
            lines.append("validation set: none, so no evaluation (a second share of --split, or --valid-data-path)")
        if data.test is None and not run.data.per_split and parse_split(split)[2] is not None:
            lines.append(f"test set: none, --split {split} leaves it no document")
    return "\n".join(lines)


def _number(epochs: float) -> str:
    return f"{epochs:.3g}" if epochs < 100 else f"{epochs:,.0f}"
