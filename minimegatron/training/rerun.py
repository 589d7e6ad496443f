"""A bad step, taken once more on the spot: which operation, rank, microbatch and sample, and whose fault.

The problem in a sentence: `lm loss is nan` after three weeks says nothing about whether a document, a kernel or a GPU
is to blame, and the run that is started again to find out does not show it again.

A bad step has moved nothing: it is found before the optimizer (`training/trainer`). So the weights, the place in the
data and, from a snapshot of 5 kB a stream, the random numbers of the step are all still there, and the step can be
taken again in place, with a probe (`training/probe`) that looks at every tensor. This costs nothing until a step is
bad; then two or three steps. A command that replays a finished run later would need a checkpoint of every step, and
would run on other machines, so it could not tell a fault of the machine from one of the data.

| what is found                                                  | verdict                                        |
|----------------------------------------------------------------|------------------------------------------------|
| a weight that is not finite                                    | `weight`: no batch will do; go back            |
| the second time nothing is bad                                 | `transient`: the machine, or a race            |
| the same again, and where the sample goes when replicas change | `data`: the sample, with these weights         |
| samples, it is bad as well                                     |                                                |
| the same again, and it stays with the rank                     | `persistent`: this rank's machine, or its state|
| the same again, and there is one replica                       | `reproducible`: the sample, or this machine    |

The replicas change samples by taking the microbatches of the next dp rank. All ranks of tp, cp and pp do it together.

The first tensor that is not finite is the first in the order of execution: forward before backward, microbatch by
microbatch, layer by layer; a module is seen after its parts, so the innermost one is named. Scales of delayed FP8 have
moved by one step at the second time.

Megatron-LM: `megatron/core/rerun_state_machine.py` (`--rerun-mode validate_results`), which also reruns a step in place
and, after a restart, on another GPU; it classifies in the same way and names neither operation nor sample.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from minimegatron.comm.agree import gather_objects
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.random import RngStreams, Snapshot
from minimegatron.config.run import RunConfig
from minimegatron.data.blend import BlendedDataset
from minimegatron.data.gpt_dataset import Batch, Dataset, GPTDataset
from minimegatron.data.indexed import IndexedDataset
from minimegatron.errors import BadStep, named
from minimegatron.layers.param import logical_parameters
from minimegatron.layers.step_hooks import StepHooks
from minimegatron.optim.optimizer import MixedPrecisionOptimizer
from minimegatron.optim.scaler import loss_divisor
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.parallel.data.finalize import finalize_model_grads
from minimegatron.training.datasets import RunData, microbatches
from minimegatron.training.probe import LOSSES, Place, Probe
from minimegatron.training.reports import reduce_reports
from minimegatron.training.step import get_forward_backward_func
from minimegatron.training.task import Task

_PHASES = {"forward": 0, "gradient": 1, "recompute": 1, "parameter": 2}
_LAYER = re.compile(r"\blayers\.(\d+)\.")
SHOWN = 160  # letters of a text
Z = 6.0  # a sample stands out: so many robust standard deviations above the others


class Trains(Protocol):
    """What of a `Trainer` takes a step again; see there."""

    run: RunConfig
    mesh: Mesh
    model: DataParallel
    optimizer: MixedPrecisionOptimizer
    rng: RngStreams
    data: RunData
    train_set: Dataset
    task: Task
    forward_step: Any

    def refuse_spike(self, losses: Mapping[str, float]) -> None: ...


@dataclasses.dataclass(frozen=True)
class Bad:
    """The first tensor of a rank that is not finite.

    Attributes:
        phase, module, kind, microbatch: its place, and the class of the module.
        count, size: how many of its elements are not finite.
        before: the tensor before it on this rank, and its largest magnitude.
        sample: number of its sample, None if a row does not say.
        order: sorts places by execution.
    """

    phase: str
    module: str
    kind: str
    microbatch: int
    count: int
    size: int
    before: str
    sample: int | None
    order: tuple[int, int, int, int]


@dataclasses.dataclass
class Replay:
    """What a step has given, when it was taken again.

    Attributes:
        bad: rank -> its first tensor that is not finite.
        losses: mean losses of the step by name.
        samples: number of a sample -> (mean loss, position of its replica on dp).
        counted: tokens that counted, over all ranks.
    """

    bad: dict[int, Bad]
    losses: dict[str, float]
    samples: dict[int, tuple[float, int]]
    counted: float

    @property
    def first(self) -> tuple[list[int], Bad] | None:
        """The ranks whose bad tensor is the first in the order of execution, and the tensor."""
        if not self.bad:
            return None
        least = min(bad.order[:3] for bad in self.bad.values())
        ranks = [rank for rank, bad in self.bad.items() if bad.order[:3] == least]
        return ranks, min((self.bad[rank] for rank in ranks), key=lambda bad: bad.order)

    @property
    def outlier(self) -> int | None:
        """The sample whose loss stands out: not finite, or the largest and far above the others."""
        if not self.samples:
            return None
        infinite = [k for k, (loss, _) in self.samples.items() if not math.isfinite(loss)]
        if infinite:
            return infinite[0]
        ordered = sorted(loss for loss, _ in self.samples.values())
        median = ordered[len(ordered) // 2]
        spread = 1.4826 * sorted(abs(loss - median) for loss in ordered)[len(ordered) // 2]
        worst = max(self.samples, key=lambda k: self.samples[k][0])
        return worst if self.samples[worst][0] > median + Z * max(spread, 0.01 * abs(median)) else None


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a bad step was.

    Attributes:
        verdict: `weight`, `transient`, `data`, `persistent`, `reproducible` or `unclear`.
        what: the operation, rank, microbatch, sample.
        ranks: the ranks that it happened on.
        sample: number of the sample, or None.
        where: the document, its place in a file, its text.
        fix: what to do.
    """

    verdict: str
    what: str
    ranks: tuple[int, ...]
    sample: int | None
    where: str
    fix: str

    def of(self, error: BadStep) -> BadStep:
        """The error of the bad step, which says what was found."""
        where = "; ".join(filter(None, (error.where, self.where)))
        return BadStep(f"{error.what}\n  replayed: {self.verdict}: {self.what}", where=where, fix=self.fix)


def find(trainer: Trains, before: Snapshot, first: int, batch_size: int) -> Finding:
    """Take a bad step again and say what it was; all ranks must call it, after `BadStep`.

    Args:
        trainer: has taken the step; nothing of it changes but the gradients.
        before: the random streams before the step.
        first: its first sample.
        batch_size: its samples over all ranks.
    """
    mesh, dataset = trainer.mesh, trainer.train_set
    if weights := bad_weights(trainer):
        ranks = sorted({rank for ranks in weights.values() for rank in ranks})
        names = list(weights)
        more = f", and {len(names) - 1} more weights" if len(names) > 1 else ""
        return Finding(
            "weight",
            f"{names[0]} is not finite on {named(weights[names[0]])}{more}, before the step",
            tuple(ranks),
            None,
            "",
            "go back to a checkpoint before it: --bad-step rollback, or --load FOLDER --ckpt-step N",
        )
    again = replay(trainer, before, first, batch_size)
    if again.counted == 0:
        what = f"no label of samples {first} to {first + batch_size - 1} counts"
        return Finding("data", what, (), first, origin(dataset, first, trainer.data.tokenizer), FIXES["data"])
    if not is_bad(trainer, again):
        return Finding(
            "transient",
            "taken again with the same weights, samples and random numbers, the step is good",
            (),
            None,
            "",
            "test the machine (doctor, the GPU's error counters) or look for a race; "
            "--bad-step skip or rollback goes on",
        )
    at, outlier = again.first, again.outlier
    ranks = at[0] if at is not None else []
    sample = at[1].sample if at is not None and at[1].sample is not None else outlier
    if sample is not None and not ranks:
        replica = again.samples[sample][1]
        ranks = [r for r, c in enumerate(gather_objects(mesh.dp.rank, mesh.world)) if c == replica]
    what = _operation(at, ranks, mesh.world.size) if at is not None else ""
    if sample is not None and sample in again.samples:
        loss = again.samples[sample][0]
        others = [value for k, (value, _) in again.samples.items() if k != sample]
        what += f"{'; ' if what else ''}sample {sample} has a loss of {loss:.6g}"
        what += f", the others {min(others):.4g} to {max(others):.4g}" if others else ""
        what += f", on {named(ranks)}" if at is None and ranks else ""
    what = what or "no sample and no tensor stands out"
    verdict = _verdict(trainer, before, first, batch_size, again, sample)
    where = "" if sample is None else origin(dataset, sample, trainer.data.tokenizer)
    return Finding(verdict, what, tuple(ranks), sample, where, FIXES[verdict])


FIXES = {
    "data": "look at the sample and what overflows on it; --bad-step skip or rollback goes on without it",
    "persistent": "take this rank's machine out and test it: other ranks compute the same sample well",
    "reproducible": "resume on another machine: if it is bad there as well it is the sample, which --bad-step skip "
    "leaves out",
    "unclear": "look at all samples of the step; --bad-step skip or rollback goes on without them",
}


def _verdict(trainer: Trains, before: Snapshot, first: int, batch_size: int, again: Replay, sample: int | None) -> str:
    """Let replicas change samples, and see whether the trouble moves with the sample."""
    size = trainer.mesh.dp.size
    if size == 1:
        return "reproducible"
    replica_of = gather_objects(trainer.mesh.dp.rank, trainer.mesh.world)
    moved = replay(trainer, before, first, batch_size, shift=1)

    def replicas(one: Replay) -> set[int]:
        at = one.first
        if at is not None:
            return {replica_of[rank] for rank in at[0]}
        return {one.samples[k][1] for k in [one.outlier] if k is not None}

    then, now = replicas(again), replicas(moved)
    if not now and not is_bad(trainer, moved):
        return "persistent" if then else "unclear"
    if then and now == {(d - 1) % size for d in then} and now != then:
        return "data"
    if then and now == then:
        return "persistent"
    return "unclear"


def _operation(at: tuple[list[int], Bad], ranks: list[int], world: int) -> str:
    bad = at[1]
    subject = {
        "forward": f"the output of {bad.module}",
        "gradient": f"the gradient of the output of {bad.module}",
        "recompute": f"the recomputed output of {bad.module}",
        "parameter": f"the gradient of {bad.module}",
    }[bad.phase]
    kind = f" ({bad.kind})" if bad.kind else ""
    on = named(ranks) if len(ranks) < world or world == 1 else f"all {world} ranks"
    of = f"{bad.count} of {bad.size} numbers" if bad.size else "some numbers"
    after = f"; before it {bad.before}" if bad.before else ""
    return f"{subject}{kind} is the first tensor that is not finite, on {on}, microbatch {bad.microbatch} ({of}){after}"


def bad_weights(trainer: Trains) -> dict[str, list[int]]:
    """{logical name: ranks} of the weights that hold NaN or infinity, equal on all ranks."""
    with trainer.model.whole_weights():
        own = [name for name, p in logical_parameters(trainer.model) if not bool(p.detach().isfinite().all())]
    found: dict[str, list[int]] = {}
    for rank, names in enumerate(gather_objects(own, trainer.mesh.world)):
        for name in names:
            found.setdefault(name, []).append(rank)
    return found


def is_bad(trainer: Trains, again: Replay) -> bool:
    """Whether a replayed step would be refused as the first one was."""
    if again.bad or not all(math.isfinite(loss) for loss in again.losses.values()):
        return True
    try:
        trainer.refuse_spike(again.losses)
    except BadStep:
        return True
    return False


def replay(trainer: Trains, before: Snapshot, first: int, batch_size: int, shift: int = 0) -> Replay:
    """The passes of a step once more, watched; all ranks must call it.

    Args:
        trainer, before, first, batch_size: as of `find`.
        shift: each rank takes the samples of the dp rank that is so many further.
    """
    run, mesh, model = trainer.run, trainer.mesh, trainer.model
    size = run.training.micro_batch_size
    count = batch_size // (size * mesh.dp.size)
    replica = (mesh.dp.rank + shift) % mesh.dp.size
    watch = _Watch(first, size, replica, trainer)
    probe = Probe(model, watch.see)
    batches = trainer.task.prepare(microbatches(trainer.train_set, size, mesh, first, mesh.device, replica), count)
    hooks, passes = StepHooks(model, mesh), get_forward_backward_func(model)
    model.zero_grad_buffer()
    optimizer, divisor = trainer.optimizer, loss_divisor(run.model.dtype, size * run.data.seq_length)
    scale = optimizer.loss_scale / divisor * trainer.task.counts_per_token
    with trainer.rng.replay(before), probe.watching(), hooks.passes(scale):
        tokens, reports = passes(
            probe.of(watch.of(trainer.forward_step)),
            batches,
            model,
            count,
            lambda loss: optimizer.scale_loss(loss / divisor),
        )
    counted = finalize_model_grads(model, mesh, tokens)
    reports |= hooks.reports()
    losses = reduce_reports(reports, model, hook_tables=hooks.tables()).losses
    if watch.bad is None:
        watch.look_at_gradients()
    everyone = gather_objects((watch.bad, watch.losses, mesh.dp.rank, mesh.tp.rank), mesh.world)
    sums: dict[int, list[float]] = {}
    replicas: dict[int, int] = {}
    for _, of_samples, dp, tp in everyone:
        for sample, (total, weight) in of_samples.items() if tp == 0 else ():
            pair = sums.setdefault(sample, [0.0, 0.0])
            pair[0], pair[1], replicas[sample] = pair[0] + total, pair[1] + weight, dp
    means = {k: (total / weight if weight else 0.0, replicas[k]) for k, (total, weight) in sorted(sums.items())}
    return Replay({r: bad for r, (bad, *_) in enumerate(everyone) if bad is not None}, losses, means, float(counted))


class _Watch:
    """Looks for the first tensor that is not finite, and sums the losses of each sample.

    Args:
        first: first sample of the step.
        size: samples of a microbatch.
        replica: whose samples this rank has.
        trainer: the run.
    """

    def __init__(self, first: int, size: int, replica: int, trainer: Trains) -> None:
        self.first, self.size, self.replica, self.trainer = first, size, replica, trainer
        self.bad: Bad | None = None
        self.losses: dict[int, tuple[float, float]] = {}
        self.before, self.seen, self.done = "", 0, 0

    def samples_of(self, microbatch: int) -> range:
        """Numbers of the samples of a microbatch of this rank."""
        begin = self.first + (microbatch * self.trainer.mesh.dp.size + self.replica) * self.size
        return range(begin, begin + self.size)

    def of(self, forward_step: Any) -> Any:
        """`forward_step`, whose losses are summed by sample; it is called once for each stage and microbatch."""

        def step(batches: Iterator[Batch], model: Any) -> Any:
            batch = next(batches)
            output, summed = forward_step(iter((batch,)), model)
            mask = batch.get("loss_mask")
            if isinstance(output, torch.Tensor) and mask is not None and output.shape == mask.shape:
                counted = output.detach().double().masked_fill(mask == 0, 0.0) * mask
                rows = zip(counted.sum(1).tolist(), mask.double().sum(1).tolist(), strict=True)
                for sample, (total, weight) in zip(self.samples_of(self.done), rows, strict=False):
                    self.losses[sample] = total, weight
                self.done += 1
            return output, summed

        return step

    def see(self, place: Place, tensor: torch.Tensor, module: Any) -> None:
        self.seen += 1
        if self.bad is not None and self.bad.order[:2] <= (_PHASES[place.phase], place.microbatch):
            return  # not earlier
        if not tensor.is_floating_point() or not tensor.numel():
            return
        wrong = ~tensor.isfinite()
        count = int(wrong.sum())
        if count:
            order = (_PHASES[place.phase], place.microbatch, _depth(place), self.seen)
            kind = "" if module is None else type(module).__name__
            sample = self._sample(place, wrong)
            self.bad = Bad(
                place.phase, str(place), kind, place.microbatch, count, tensor.numel(), self.before, sample, order
            )
        else:
            self.before = f"{place} is finite, at most {tensor.abs().max().item():.3g}"

    def _sample(self, place: Place, wrong: torch.Tensor) -> int | None:
        """The first sample with a bad element, where the tensor has a dim of samples: [s, b, ...], or [b, s]."""
        samples = self.samples_of(place.microbatch)
        if len(samples) == 1:
            return samples[0]
        dim = 0 if place.module == LOSSES else 1
        if wrong.dim() < 2 or wrong.shape[dim] != len(samples):
            return None
        others = [d for d in range(wrong.dim()) if d != dim]
        return samples[int(wrong.any(others[0]).nonzero()[0]) if wrong.dim() == 2 else int(
            wrong.transpose(0, dim).flatten(1).any(1).nonzero()[0])]  # fmt: skip

    def look_at_gradients(self) -> None:
        """Every activation is finite: the gradients of weights."""
        for name, grad in self.trainer.model.whole_gradients().items():
            count = int((~grad.isfinite()).sum())
            if count:
                order = (_PHASES["parameter"], 0, 0, 0)
                self.bad = Bad("parameter", name, "", 0, count, grad.numel(), "every activation is finite", None, order)
                return


def _depth(place: Place) -> int:
    """Where a module is in the model, for ranks that have other stages; backwards in the backward pass."""
    layer = _LAYER.search(place.module + ".")
    depth = int(layer[1]) if layer else -1 if place.module.startswith("embedding") else 1 << 20
    return depth if place.phase == "forward" else -depth


def origin(dataset: Any, sample: int, tokenizer: Any) -> str:
    """The documents of a sample, their place in the file, and the beginning of its text."""
    parts = [f"sample {sample}"]
    if isinstance(dataset, BlendedDataset):
        dataset, sample = dataset.find(sample)
        parts.append(f"its number {sample} in {dataset.name}")
    if isinstance(dataset, GPTDataset):
        pieces = list(dataset.spans(sample))
        parts.append(f"document {', '.join(str(sequence) for sequence, *_ in pieces[:4])} of {dataset.name}")
        if isinstance(source := dataset.dataset, IndexedDataset):
            sequence, offset, _ = pieces[0]
            start = int(source.sequence_pointers[sequence]) + offset * source.dtype.itemsize
            parts.append(f"from byte {start} of {source.bin_path}")
        ids = [int(i) for piece in pieces for i in dataset.dataset.get(*piece)[:SHOWN]]
    else:
        ids = dataset.batch([sample])["tokens"][0].tolist()
    text = tokenizer.detokenize(ids[:SHOWN])
    parts.append(repr(text[:SHOWN] + ("..." if len(text) > SHOWN else "")))
    return ", ".join(parts)
