"""A run as a value: model, optimizer, schedule, random streams and counters, to and from logical tensors.

A resumed run must equal the one that ended. If it forgets a loss scale, a counter or a generator, no error says so, so
everything that a checkpoint holds is listed here:

| part                         | name in the checkpoint           | holds in another layout                       |
|------------------------------|----------------------------------|-----------------------------------------------|
| weights, frozen ones too     | `model.<logical name>`           | yes, without the vocabulary's padding         |
| buffers: FP8 scales, history | `model.<logical name>`           | yes, they are equal where they are held twice |
| optimizer, main parameters   | `optimizer.<key>.<logical name>` | yes: moments lie where the weights lie        |
| the task: rollouts, ...      | `task.<name>`                    | yes, they are equal on all ranks              |
| random streams               | `rng.<stream>.<device>`          | no, a row for each rank: new ones, and it is said |
| counters, schedule, scaler   | `state` of the manifest          | yes                                           |
| configuration                | `state` of the manifest          | another run's is refused: `same_run`          |
| digest of the next sample    | `state` of the manifest          | another sample is refused: `same_run`         |

The position in the data is a counter: the order of samples is a function of the seed and of the number of consumed
samples, and of `joint_samples` where the first epochs are shuffled together (`data/indices`). Batch size and learning
rate are functions of that counter as well.

A process may hold several, in different layouts of the same ranks: the one that is trained, and a reference without
optimizer, schedule and streams. They share the process's default generators, which `RngStreams.on_mesh` seeds, so only
the one that draws has streams.

Megatron-LM: `generate_state_dict` and `load_checkpoint` in `megatron/training/checkpointing.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from minimegatron.checkpoint.manifest import Manifest
from minimegatron.checkpoint.regions import Logical, Region, regions
from minimegatron.checkpoint.shard_file import DTYPES
from minimegatron.comm.agree import gather_objects
from minimegatron.comm.axis import Axis
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.random import RngStreams
from minimegatron.config import ParallelConfig
from minimegatron.config.run import RunConfig
from minimegatron.errors import CheckpointError, did_you_mean
from minimegatron.layers.param import layout_of, logical_buffers, logical_parameters
from minimegatron.optim.optimizer import MixedPrecisionOptimizer
from minimegatron.optim.schedule import OptimizerParamScheduler
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.training.datasets import Joint
from minimegatron.training.same_run import MODEL, fields_of


@dataclasses.dataclass
class TrainState:
    """Counters of a run, equal on all ranks.

    Attributes:
        iteration: steps taken, skipped ones among them.
        consumed_train_samples: over all ranks; decides the next sample, batch size and learning rate.
        consumed_valid_samples: samples read of the validation set.
        skipped_iterations: steps in which the weights were not updated.
        recent_losses: losses of the last good steps (`training/trainer.py`).
        validation_loss: the loss of exactly these weights; None if they were not evaluated.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    validation_loss: float | None = None
    recent_losses: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class RunState:
    """A run as a value.

    Attributes:
        run: the configuration.
        mesh: the layout.
        model: this rank's model in its data-parallel wrapper; may be frozen.
        optimizer, scheduler, rng: None for a model that is not trained and draws nothing.
        counters: the counters; one object for the life of the run.
        facts: facts for its checkpoints (`same_run.facts_of`); default the fields of its configuration.
        joint: samples of each set whose epochs are shuffled together.
        of_task: tensors of the task (`training/task`), equal on all ranks, or this rank's part of logical ones.
        tokens_of: digest of a training sample by its number; "" for one of which nothing is known before it is read.
    """

    run: RunConfig
    mesh: Mesh
    model: DataParallel
    optimizer: MixedPrecisionOptimizer | None = None
    scheduler: OptimizerParamScheduler | None = None
    rng: RngStreams | None = None
    counters: TrainState = dataclasses.field(default_factory=TrainState)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    joint: Joint = (None, None, None)
    of_task: Mapping[str, torch.Tensor | Logical] = dataclasses.field(default_factory=dict)
    tokens_of: Callable[[int], str] = lambda sample: ""

    def __post_init__(self) -> None:
        self.facts = self.facts or fields_of(self.run)

    def tensors(
        self, optim: bool = True, rng: bool = True, state: Mapping[str, Any] | None = None, task: bool = True
    ) -> dict[str, Logical]:
        """All tensors of the run by their names in a checkpoint: this rank's parts of logical tensors.

        Args:
            optim, rng: include those of the optimizer, and of the random streams, if the run has any.
            state: `optimizer.state_dict()["state"]`, if a reader is to fill it.
            task: include those of the task.
        """
        tensors = model_tensors(self.model)
        if task:
            of_task = ((f"task.{name}", tensor) for name, tensor in self.of_task.items())
            tensors |= {name: t if isinstance(t, Logical) else _whole(t) for name, t in of_task}
        if optim and self.optimizer is not None:
            state = self.optimizer.state_dict()["state"] if state is None else state
            tensors |= optimizer_tensors(self.optimizer, state, rounded=self.model.rounds_to is not None)
        if rng and self.rng is not None:
            tensors |= rng_tensors(self.rng, self.mesh.world)
        return tensors

    def values(self) -> dict[str, Any]:
        """Everything that is no tensor, for the manifest of a checkpoint."""
        own: dict[str, Any] = {}
        if self.optimizer is not None and self.scheduler is not None:
            own = {
                "counters": dataclasses.asdict(self.counters),
                "next_sample": self.tokens_of(self.counters.consumed_train_samples),
                "validation_loss": self.counters.validation_loss,
                "scheduler": self.scheduler.state_dict(),
                "grad_scaler": self.optimizer.state_dict()["grad_scaler"],
            }
        return own | {
            "model": self.run.model.to_dict(),
            "layout": layout_facts(self.mesh),
            "seed": self.run.training.seed,
            "run": {name: fact for name, fact in self.facts.items() if name not in MODEL},
            "joint_samples": list(self.joint),
        }

    def changed_by_passes(self, tensors: Mapping[str, Logical]) -> set[str]:
        """Names of those of `tensors` that change before the optimizer's update; tensors of random streams are copies
        already."""
        return {name for n, _ in logical_buffers(self.model) if (name := f"model.{n}") in tensors}

    def load(
        self,
        manifest: Manifest,
        read: Callable[[dict[str, Logical]], None],
        *,
        optim: bool = True,
        rng: bool = True,
        goes_on: bool = True,
        **schedule: bool,
    ) -> None:
        """Load a checkpoint of any layout, or a part of it; all ranks must call it.

        Args:
            manifest: manifest of the checkpoint.
            read: fills this rank's parts of logical tensors from its files.
            optim: load the optimizer's state; without it the optimizer begins with these weights.
            rng: load the random streams, which are those of the layout that was saved.
            goes_on: load counters and schedule.
            schedule: whose schedule wins (`OptimizerParamScheduler.load_state_dict`).

        Raises:
            CheckpointError: a tensor is missing, has another shape or is unexpected; streams of other devices.
        """
        optim, rng = optim and self.optimizer is not None, rng and self.rng is not None
        filled = self.optimizer.state_dict()["state"] if optim and self.optimizer is not None else {}
        tensors = self.tensors(optim, rng, filled, goes_on)
        if not goes_on:
            tensors = {
                name: tensor
                for name, tensor in tensors.items()
                if name in manifest.tensors or name not in added_tensors(self.model)
            }
        taken = {"optimizer.": optim, "rng.": rng, "task.": goes_on}
        skipped = [prefix for prefix, is_taken in taken.items() if not is_taken]
        check_same_tensors(tensors, manifest, skipped, self.mesh.world)
        read(tensors)
        if optim and self.optimizer is not None:
            self.optimizer.load_state_dict({"state": filled, "grad_scaler": manifest.state["grad_scaler"]})
        else:
            take_rounded(self.model, tensors)
            self.took_weights()
        if goes_on:
            vars(self.counters).update(vars(TrainState(**manifest.state["counters"])))
            if self.scheduler is not None:
                self.scheduler.load_state_dict(manifest.state["scheduler"], **schedule)
        if rng and self.rng is not None:
            self.rng.load_state_dict(_streams(tensors))

    def took_weights(self) -> None:
        """Update main parameters and gathered weights, after the weights of the model were overwritten; all ranks must
        call it."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()
        self.model.start_param_gather()

    def begin_streams(self) -> None:
        """Seed new random streams from the run's seed and iteration, because the saved ones are those of another
        layout."""
        if self.rng is not None:
            seed = self.run.training.seed + self.counters.iteration
            self.rng.load_state_dict(RngStreams.on_mesh(seed, self.mesh).state_dict())


def added_tensors(model: DataParallel) -> set[str]:
    """Names in a checkpoint of the parameters that no pre-trained model has (`ParamLayout.added`)."""
    return {f"model.{name}" for name, param in logical_parameters(model) if layout_of(param).added}


def model_tensors(model: DataParallel) -> dict[str, Logical]:
    """Weights and buffers by their names in a checkpoint."""
    tensors = {f"model.{name}": weight for name, weight in model_weights(model).items()}
    return tensors | {f"model.{name}": _whole(buffer) for name, buffer in logical_buffers(model)}


def model_weights(model: DataParallel) -> dict[str, Logical]:
    """Weights by their logical names; of sharded weights this rank's pieces.

    If the model's own weights are the main parameters (`rounds_to`), these are copies, rounded to the model's dtype,
    and `optimizer_tensors` has the weights. So a checkpoint does not depend on the wrapper that wrote it.
    """
    tensors: dict[str, Logical] = {}
    shards = model.shards()
    for name, param in logical_parameters(model):
        layout = layout_of(param)
        dtype = param.dtype
        if param.requires_grad:
            shard, dtype = shards.get(name), model.rounds_to or dtype
            parts = [] if shard is None else regions(layout, shard.data.to(dtype), shard.piece)
        else:
            parts = regions(layout, param.detach())
        if layout.shared and name in tensors:
            continue  # the original is here too, and they share memory
        tensors[name] = Logical(layout.unpadded_shape, parts, dtype)
    return tensors


def take_rounded(model: DataParallel, tensors: Mapping[str, Logical]) -> None:
    """Make rounded copies the weights, after a checkpoint was read into `model_tensors` without `optimizer_tensors`."""
    params = model.params
    for name, shard in model.shards().items() if model.rounds_to is not None else ():
        own = regions(layout_of(params[name]), shard.data, shard.piece)
        for part, read in zip(own, tensors[f"model.{name}"].parts, strict=True):
            part.data.copy_(read.data)


def optimizer_tensors(
    optimizer: MixedPrecisionOptimizer, state: Mapping[str, Any], rounded: bool = False
) -> dict[str, Logical]:
    """Moments, steps and main parameters of `optimizer.state_dict()`, with the layouts of their parameters.

    Args:
        state: `state_dict()["state"]`; tensors that are read into it are the optimizer's when it has loaded them.
        rounded: also main parameters that are the model's.
    """
    tensors: dict[str, Logical] = {}
    for p in optimizer.params:
        layout = layout_of(p.model)
        itself = {"fp32_param": p.main.detach()} if rounded else {}
        for key, tensor in (state[p.name] | itself).items():
            name = f"optimizer.{key}.{p.name}"
            if tensor.dim() == 0:
                tensors[name] = _whole(tensor)
            else:
                tensors[name] = Logical(layout.unpadded_shape, regions(layout, tensor, p.piece), tensor.dtype)
    return tensors


def rng_tensors(rng: RngStreams, world: Axis) -> dict[str, Logical]:
    """A row for each rank; `load_state_dict` of the returned value restores a generator that was read."""
    tensors: dict[str, Logical] = {}
    for stream, devices in rng.state_dict().items():
        for device, state in devices.items():
            box = ((world.rank, world.rank + 1), (0, state.numel()))
            row = Region(box, state.clone().view(1, -1))
            tensors[f"rng.{stream}.{device}"] = Logical((world.size, state.numel()), [row], torch.uint8)
    return tensors


def _streams(tensors: Mapping[str, Logical]) -> dict[str, dict[str, torch.Tensor]]:
    """`RngStreams.state_dict()` from the tensors that were read."""
    streams: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("rng."):
            _, stream, device = name.split(".")
            streams.setdefault(stream, {})[device] = tensor.parts[0].data.view(-1)
    return streams


def _whole(tensor: torch.Tensor) -> Logical:
    box = tuple((0, n) for n in tensor.shape)
    return Logical(tensor.shape, [Region(box, tensor)], tensor.dtype)


def layout_facts(mesh: Mesh) -> dict[str, int | str]:
    """The layout on which random streams depend: ranks on each axis, and their order."""
    sizes = {name: mesh.axis(name).size for name in ("tp", "cp", "pp", "dp", "ep", "etp", "world")}
    return {**sizes, "order": mesh.parallel.order}


def same_layout(saved: Mapping[str, Any], mesh: Mesh) -> bool:
    """Whether each rank has its old place; if a checkpoint lacks `etp` or `order` they are the defaults."""
    defaults = {"etp": saved.get("tp"), "order": ParallelConfig().order}
    return {**defaults, **saved} == layout_facts(mesh)


def check_same_tensors(wanted: Mapping[str, Logical], manifest: Manifest, skipped: Iterable[str], world: Axis) -> None:
    """Every tensor of both sides is accounted for, by name, shape and dtype; all ranks of `world` must call.

    Args:
        skipped: prefixes of names that are in the checkpoint and not wanted.

    Raises:
        CheckpointError: the same on all ranks: what any of them misses, and what none wants.
    """
    problems = []
    for name, tensor in wanted.items():
        stored = manifest.tensors.get(name)
        if stored is None:
            problems.append(f"{name} is not in it {did_you_mean(name, manifest.tensors)}".rstrip())
        elif (torch.Size(stored.shape), DTYPES[stored.dtype]) != (tensor.shape, tensor.dtype):
            dtype = next(n for n, d in DTYPES.items() if d == tensor.dtype)
            problems.append(f"{name}: checkpoint {stored.dtype} {stored.shape}, now {dtype} {tuple(tensor.shape)}")
    names, of_ranks = zip(*gather_objects((set(wanted), problems), world), strict=True)
    problems, everyone = list(dict.fromkeys(p for of_rank in of_ranks for p in of_rank)), set().union(*names)
    left = [n for n in manifest.tensors if n not in everyone and not n.startswith(tuple(skipped))]
    problems += [f"{name} is in it, and nothing here wants it" for name in left]
    if problems:
        shown = problems[:12] + ([f"and {len(problems) - 12} more"] if len(problems) > 12 else [])
        raise CheckpointError(
            "the checkpoint does not fit this run:\n  " + "\n  ".join(shown),
            fix="the same model, precision and optimizer; --no-load-optim takes the weights without the optimizer",
        )
