"""The determinism check: the same steps twice from the same state, and the first tensor whose bits differ.

The problem in a sentence: two runs of one command end with different weights, and one atomic addition in one backward
pass is the reason.

Both runs are whole runs (`training/build`), with the run's dropout, precision, kernels and optimizer, from the seed or
from `--load`. A probe (`training/probe`) takes a bit sum of every tensor, which any changed bit changes
(`comm/fingerprints`): 8 bytes are kept for each. After each step the weights are summed as well.

    step 1   forward ... gradient ... weights         step 2 ...        the first bit sum that differs, on each rank

What is recomputed in the backward pass must have the bits that the forward pass had, in each of the two runs.

If something differs and the run is on GPUs, torch is asked, in a third run, which of its operations have no
deterministic form (`torch.use_deterministic_algorithms(..., warn_only=True)`).

Megatron-LM: `--rerun-mode report_determinism_stats`, which compares the loss of every iteration with that of its rerun.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch

from minimegatron.comm.agree import gather_objects
from minimegatron.comm.fingerprints import bit_sum
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import CheckpointConfig, RunConfig
from minimegatron.errors import named
from minimegatron.layers.param import logical_parameters
from minimegatron.training.observers import Observer, Step
from minimegatron.training.probe import Place, Probe
from minimegatron.training.task import Task
from minimegatron.training.trainer import Trainer

Build = Callable[[RunConfig, Mesh, type[Task]], Trainer]
_NAMED = re.compile(r"^(\S+) does not have a deterministic implementation")


@dataclasses.dataclass(frozen=True)
class Sum:
    """The bits of one tensor.

    Attributes:
        step: number of the step.
        what: the tensor, in words.
        kind: class of the module, or "".
        bits: their sum.
    """

    step: int
    what: str
    kind: str
    bits: int


@dataclasses.dataclass(frozen=True)
class Repeated:
    """The result, equal on all ranks.

    Attributes:
        steps: how many were taken twice.
        tensors: how many tensors of a rank were compared, the most of any.
        first: the first one that differs, on the ranks whose is the earliest; None if all agree.
        ranks: these ranks.
        before: the last tensor before it, which agrees.
        recomputed: the first differs between the forward pass and its second run, in one and the same run.
        operations: of torch, without a deterministic form.
    """

    steps: int
    tensors: int
    first: Sum | None = None
    ranks: tuple[int, ...] = ()
    before: str = ""
    recomputed: bool = False
    operations: tuple[str, ...] = ()

    def verdict(self) -> tuple[str, str, str]:
        """(What, where, fix); what alone if all agree."""
        steps = f"{self.steps} step{'s' * (self.steps > 1)}"
        if self.first is None:
            return f"{steps} taken twice are the same, bit for bit: {self.tensors} tensors of a rank", "", ""
        kind = f" ({self.first.kind})" if self.first.kind else ""
        runs = "the forward pass and its second run" if self.recomputed else "two runs from one state"
        after = f"; the tensor before it, {self.before}, is the same" if self.before else ""
        what = f"{self.first.what}{kind} of step {self.first.step} is not the same in {runs}{after}"
        fix = f"look at what {self.first.what} is computed by: additions in no fixed order, a random number, a race"
        if self.recomputed:
            fix = "the second run has to draw from the streams that `layers/recompute` replays"
        if self.operations:
            fix += f"; torch has no deterministic form of {', '.join(self.operations)}"
        return what, named(self.ranks), fix

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
        return dataclasses.asdict(self) | {"agree": self.first is None}


class _Sums(Observer):
    """Sums the bits of everything that some steps compute.

    Args:
        trainer: the run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.step, self.taken, self.sums = trainer, 0, 0, list[Sum]()
        self.probe = Probe(trainer.model, self.see)
        self.forward: dict[Place, int] = {}
        self.recomputed: tuple[int, Sum] | None = None
        trainer.forward_step = self.probe.of(trainer.forward_step)  # type: ignore[assignment]
        trainer.observers = [*trainer.observers, self]

    def before_step(self, done: int) -> None:
        self.step = done + 1
        self.probe.begin()
        self.forward.clear()

    def see(self, place: Place, tensor: torch.Tensor, module: Any) -> None:
        words = {"gradient": "the gradient of the output of", "recompute": "the recomputed output of"}
        what = f"{words.get(place.phase, 'the output of')} {place}, microbatch {place.microbatch}"
        kind = "" if module is None else type(module).__name__
        one = Sum(self.step, what, kind, bit_sum(tensor.contiguous()))
        self.sums.append(one)
        if place.phase == "forward":
            self.forward[place] = one.bits
        elif place.phase == "recompute" and self.recomputed is None:
            if self.forward.get(place._replace(phase="forward"), one.bits) != one.bits:
                self.recomputed = len(self.sums), one

    def after_step(self, step: Step) -> None:
        self.taken += 1
        with self.trainer.model.whole_weights():
            for name, param in logical_parameters(self.trainer.model):
                self.sums.append(Sum(self.step, f"the weight {name} after the step", "", bit_sum(param)))


def twice(run: RunConfig, mesh: Mesh, task: type[Task], build: Build, steps: int) -> Repeated:
    """Take the next steps of a run twice, each time from its beginning; all ranks must call it.

    Args:
        run: the configuration; nothing is saved or logged.
        mesh: the layout.
        task: its data and its loss.
        build: builds the trainer of a run.
        steps: how many.
    """
    run = silent(run)
    first, second = (_sums(run, mesh, task, build, steps) for _ in range(2))
    again, steps = first.recomputed or second.recomputed, first.taken
    found: tuple[int, Sum] | None = None
    for index, (a, b) in enumerate(zip(first.sums, second.sums, strict=False)):
        if a != b:
            found = index, a
            break
    before = first.sums[found[0] - 1].what if found and found[0] else ""
    agains, founds, befores, counts = zip(
        *gather_objects((again, found, before, len(first.sums)), mesh.world), strict=True
    )
    recomputed = any(one is not None for one in agains)
    by_rank: dict[int, tuple[int, Sum] | None] = dict(
        zip(mesh.world.ranks, agains if recomputed else founds, strict=True)
    )
    off = {rank: one for rank, one in by_rank.items() if one is not None}
    tensors = max(counts)
    if not off:
        return Repeated(steps, tensors)
    earliest = min(index for index, _ in off.values())
    ranks = tuple(r for r, (index, _) in off.items() if index == earliest)
    one = off[ranks[0]][1]
    if recomputed:
        return Repeated(steps, tensors, one, ranks, "", True)
    operations: tuple[str, ...] = ()
    if mesh.device.type == "cuda":
        operations = _without_a_deterministic_form(lambda: _sums(run, mesh, task, build, 1))
    return Repeated(steps, tensors, one, ranks, befores[ranks[0]], False, operations)


def silent(run: RunConfig) -> RunConfig:
    """The run, which saves, logs and evaluates nothing."""
    kept = ("load", "ckpt_step", "load_optim", "load_rng", "finetune", "verify_checkpoint", "use_checkpoint_args")
    checkpoint = CheckpointConfig(**{name: getattr(run.checkpoint, name) for name in kept})
    training = dataclasses.replace(
        run.training, log_file=None, tensorboard_dir=None, wandb_project=None, eval_interval=None, profile=False,
        use_pytorch_profiler=False, check_first_step=False, bad_step="stop", rerun_mode="disabled",
    )  # fmt: skip
    return dataclasses.replace(run, checkpoint=checkpoint, training=training)


def _sums(run: RunConfig, mesh: Mesh, task: type[Task], build: Build, steps: int) -> _Sums:
    trainer = build(run, mesh, task)
    sums = _Sums(trainer)
    trainer.train_iters = min(trainer.train_iters, trainer.state.iteration + steps)
    try:
        with sums.probe.watching():
            trainer.train()
    finally:
        trainer.close()
    return sums


def _without_a_deterministic_form(step: Callable[[], Any]) -> tuple[str, ...]:
    """Names of torch's operations that warn in a step."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            step()
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    found = (_NAMED.match(str(one.message)) for one in caught)
    return tuple(dict.fromkeys(match[1] for match in found if match))
