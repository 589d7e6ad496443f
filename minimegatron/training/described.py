"""What a run prints before its first step: on which machine and data, which model, how many steps of what."""

from __future__ import annotations

import torch

import minimegatron
from minimegatron.comm.mesh import Mesh
from minimegatron.config.stages import plan_stages
from minimegatron.data.builder import Dataset, parse_split
from minimegatron.models.chunks import count_parameters
from minimegatron.training.datasets import RunData
from minimegatron.training.microbatches import NumMicrobatches
from minimegatron.training.run import RunConfig
from minimegatron.training.without_effect import per_split

NAMED = 8  # files of a blend


def describe_machine(run: RunConfig, mesh: Mesh) -> str:
    """What is known before the data is opened; building a large index takes a while."""
    sizes = [f"{name}{mesh.axis(name).size}" for name in ("tp", "cp", "pp", "dp") if mesh.axis(name).size > 1]
    layout = f"{mesh.world.size} rank{'s'[: mesh.world.size > 1]}{': ' if sizes else ''}{' '.join(sizes)}"
    layout += " with sequence parallelism" if run.parallel.sequence_parallel else ""
    data = run.data
    words = data.data_path or data.train_data_path or (data.data_args_path or "mock",)
    source = f"{data.corpus}, prepared once in {data.corpus_path}/" if data.corpus else " ".join(words)
    lines = [
        *run.notes,
        f"minimegatron {minimegatron.__version__}, torch {torch.__version__}, {layout}, on {mesh.device.type}",
        f"data: {source}",
    ]
    return "\n".join(lines)


def describe_run(run: RunConfig, train_iters: int, batch_sizes: NumMicrobatches) -> str:
    """What is about to be trained, and how."""
    model = run.model
    heads = f"{model.num_attention_heads} heads over {model.num_query_groups} groups"
    lines = [
        f"model: {count_parameters(model) / 1e6:.2f} M parameters in {model.params_dtype}: {model.num_layers} layers, "
        f"h {model.hidden_size}, {heads}, f {model.ffn_hidden_size}, vocabulary {model.vocab_size}",
        f"run: {train_iters} steps of {batch_sizes.global_batch_size} samples of {run.data.seq_length} tokens, "
        f"in microbatches of {run.training.micro_batch_size}, {batch_sizes.at(0)} a rank",
    ]
    if run.parallel.pipeline_model_parallel_size > 1:
        plan = plan_stages(run.parallel, model.num_layers)
        held = " ".join(str(len(layers)) for layers in plan.layers)
        lines.append(f"pipeline: {plan.schedule}, {len(plan.layers)} stages of {held} layers on {plan.ranks} ranks")
    clip = run.optimizer.clip_grad
    cut = f"before it is clipped to {clip:g}" if clip else "which is not clipped"
    return "\n".join([*lines, f"grad norm, below: of the whole gradient, {cut}"])


def describe_data(run: RunConfig, data: RunData, train: Dataset, samples: int) -> str:
    """How often the run reads its training data, and which evaluation it goes without.

    Args:
        run: what was asked for.
        data: what was found.
        train: the training set.
        samples: of all steps.
    """
    read = train.read_epochs(samples)
    named = [f"{_number(n)} of {name}" for name, n in list(read.items())[:NAMED]]
    more = [f"{len(read) - NAMED} more files"] if len(read) > NAMED else []
    what = f"{_number(*read.values())} of its training data" if len(read) == 1 else ", ".join(named + more)
    lines = [f"epochs: the run reads {what}"]
    cut = not per_split(run.data) and parse_split(run.data.split)[2] is not None
    if cut and run.training.eval_interval and run.training.eval_iters and data.test is None:
        lines.append(f"test set: none, --split {run.data.split} leaves it no document")
    return "\n".join(lines)


def _number(epochs: float) -> str:
    return f"{epochs:.3g}" if epochs < 100 else f"{epochs:,.0f}"
