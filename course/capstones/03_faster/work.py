"""The work that is to be done faster: a few steps of a training on two ranks, their losses and their CPU-seconds.

    Rung(fields, own) --> trainer with the learner's functions --> 2 steps to warm up, N that count --> Seen

A **rung** is the run after some of the changes. What may change says how the same numbers are computed: layout,
microbatches, recompute, kernels, what is observed. What they are (model, data, optimizer, seed) may not.

CPU-seconds are of both ranks, with all of their threads and of processes that have ended below them; who waits for the
other rank or for a core does not count.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config.fields import HOW, OBSERVED
from minimegatron.config.parallel import LAYOUT
from minimegatron.config.run import KINDS, SECTION_OF, SECTIONS, RunConfig
from minimegatron.data.gpt_dataset import Batch, SampleDataset
from minimegatron.data.tokenizer import NullTokenizer
from minimegatron.errors import ConfigError, did_you_mean
from minimegatron.training.build import build_trainer
from minimegatron.training.datasets import Joint, RunData
from minimegatron.training.observers import Observer, Step
from minimegatron.training.rules import check_run
from minimegatron.training.step import LossFunc, loss_func
from minimegatron.training.task import Task

from .functions import functions_of

WORLD, WARM, STEPS = 2, 2, 2  # ranks; steps before those that count, and these
FREE = (HOW, OBSERVED, LAYOUT, KINDS["micro_batch_size"])
DOCUMENT, LIKELY = 40, 0.7  # mean tokens of a document; how often a token is followed by its favourite
_now = time.process_time


@dataclasses.dataclass(frozen=True)
class Rung:
    """The run after some of the changes.

    Attributes:
        name: of the last change.
        fields: {field: value} that differ from the baseline.
        own: the file with the run's own functions.
    """

    name: str
    fields: Mapping[str, Any]
    own: Path


@dataclasses.dataclass(frozen=True)
class Seen:
    """What some steps were.

    Attributes:
        seconds: CPU-seconds of a step, both ranks together.
        losses, norms: of each step, those to warm up among them.
    """

    seconds: float
    losses: tuple[float, ...]
    norms: tuple[float, ...]


def baseline() -> dict[str, dict[str, Any]]:
    """The slow configuration: {section: {field: value}}."""
    sections: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "start" / "baseline.json").read_text())
    return sections


def default(name: str) -> Any:
    """Of a field; None for one that is not there, which `refuse` says."""
    fields = SECTIONS[SECTION_OF[name]].__dataclass_fields__ if name in SECTION_OF else {}
    return fields[name].default if fields else None


def refuse(name: str) -> None:
    """Refuse a field that says what is computed, and not how.

    Raises:
        ConfigError: with the reason.
    """
    if name not in SECTION_OF:
        raise ConfigError(
            f"there is no field {name}", fix=did_you_mean(name, SECTION_OF) or "minimegatron train --help"
        )
    if KINDS[name] not in FREE:
        raise ConfigError(
            f"{name} says what is computed, not how", fix="layout, microbatches, recompute, kernels, what is observed"
        )


def run_of(fields: Mapping[str, Any], seed: int, steps: int) -> RunConfig:
    """The configuration of a rung.

    Raises:
        ConfigError: it cannot work.
    """
    sections = baseline()
    for name, value in fields.items():
        sections.setdefault(SECTION_OF[name], {})[name] = tuple(value) if isinstance(value, list) else value
    sections["training"] |= {"seed": seed, "train_iters": steps}
    run = RunConfig(**{name: cls.from_dict(sections.get(name, {})) for name, cls in SECTIONS.items()})
    check_run(run, WORLD, reads=True)
    return run


def stream_of(seed: int, tokens: int, vocabulary: int) -> torch.Tensor:
    """[tokens] ids of documents of a language in which each token has a favourite successor; 0 ends a document."""
    rng = np.random.default_rng(seed)
    favourite, ids = rng.permutation(vocabulary), rng.integers(1, vocabulary, tokens)
    for i in np.flatnonzero(rng.random(tokens) < LIKELY)[1:]:
        ids[i] = favourite[ids[i - 1]]
    ids[rng.random(tokens) < 1 / DOCUMENT] = 0
    return torch.from_numpy(ids)


class Stream(SampleDataset):
    """Samples that the run's own function cuts out of a stream."""

    def __init__(self, cut: Callable[..., Batch], stream: torch.Tensor, length: int, samples: int, seed: int) -> None:
        self.cut, self.stream, self.length = cut, stream, length
        self.starts = np.random.default_rng(seed).integers(0, len(stream) - length - 1, samples).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, samples: Sequence[int]) -> Batch:
        return self.cut(self.stream, [self.starts[k] for k in samples], self.length)

    def read_epochs(self, samples: int) -> dict[str, float]:
        return {"stream": samples / len(self)}

    def begun(self, first: int, end: int) -> dict[str, int]:
        return {}


def spent() -> float:
    """CPU-seconds of this process, and of those below it that have ended."""
    below = resource.getrusage(resource.RUSAGE_CHILDREN)
    return _now() + below.ru_utime + below.ru_stime


class Clock(Observer):
    """CPU-seconds after each step."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def after_step(self, step: Step) -> None:
        self.at.append(spent())


def task_of(own: ModuleType, clock: Clock, samples: int) -> type[Task]:
    """Pre-training with the run's own functions."""

    class Own(Task):
        def load_data(
            self, run: RunConfig, mesh: Mesh, num_samples: tuple[int, int, int], joint: Joint, quiet: bool
        ) -> RunData:
            vocabulary, length, seed = run.model.vocab_size, run.data.seq_length, run.training.seed
            data = Stream(own.batch, stream_of(seed, 8 * length * 16, vocabulary), length, samples, seed)
            return RunData(NullTokenizer(vocabulary - 1), vocabulary, data, None, None)

        def begin(self, *_: Any) -> Sequence[Observer]:
            return [clock]

        def forward_step(self, data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, LossFunc]:
            if not hasattr(own, "token_losses"):
                return super().forward_step(data_iterator, model)
            batch = next(data_iterator)
            logits = model(batch["tokens"], batch.get("position_ids")).transpose(0, 1)
            losses = own.token_losses(logits.float(), batch["labels"])
            mask = batch["loss_mask"]
            return losses, lambda output: loss_func(mask, output)

    return Own


def train(rank: int, world: int, rung: Rung, seed: int, steps: int = STEPS) -> Seen:
    """Some steps on this rank; the losses are those of all ranks.

    Raises:
        ConfigError: the configuration or the file cannot work.
    """
    own = functions_of(rung.own)
    run = run_of(rung.fields, seed, WARM + steps)
    parallel = run.parallel
    cut = [f"{axis}_size" for axis in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
           if getattr(parallel, f"{axis}_size") > 1]  # fmt: skip
    if hasattr(own, "token_losses") and cut:
        raise ConfigError(
            f"{cut[0]} {getattr(parallel, cut[0])}, and token_losses of {rung.own.name} wants whole logits",
            fix="a file without token_losses: then the model computes the losses of tokens",
        )
    clock, size = Clock(), run.training.global_batch_size or 1
    trainer = build_trainer(run, task=task_of(own, clock, size * (WARM + steps)), quiet=True)
    try:
        trainer.train()
    finally:
        trainer.close()
    losses = tuple(report.losses["lm loss"] for report in trainer.history)
    norms = tuple(report.grad_norm or 0.0 for report in trainer.history)
    return Seen((clock.at[-1] - clock.at[WARM - 1]) / steps, losses, norms)
