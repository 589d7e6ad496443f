"""The memory of a rank before anything runs: exact bytes of its states, and the fullest moment of a step nearly.

The problem in a sentence: a run that does not fit fails after the ranks have met and the model is built, at a tensor
that is not to blame; a plan tells you beforehand, on a laptop, for a layout of a thousand GPUs.

    bytes at the fullest moment = lasting + max over the rank's actions, and their steps, of what is alive there

| owner           | from                                                                                             |
|-----------------|--------------------------------------------------------------------------------------------------|
| parameters      | the model, built on torch's `meta` device for this rank's place (`states`)                         |
| gradients       | its buffers with their padding, built likewise by `parallel/data/ddp` (`parallel/data/buckets`)   |
| main parameters | the optimizer, built likewise for what this rank updates                                         |
| moments         | likewise; `... (host)` is the memory of the host (`--optimizer-cpu-offload`)                       |
| communication   | weights gathered for use, gradients under way (ZeRO-2 and -3): `travel`                            |
| activations     | a run on fake tensors (`dry_run`): what a microbatch keeps, times the microbatches under way       |
| workspace       | the same run: bytes that are alive only at the fullest moment                                      |

**What is compared.** Tests count live tensors on a CPU, where torch's operations or the package's emulated kernels
compute. For a GPU the same kernels are assumed, and an attention that keeps q, k, v, its output and log-sum-exp
(`gpu`); this has not been compared with live tensors on a GPU. Experts are assumed to get equal loads; `worst` is for
the most unequal ones.

Not predicted, and not in the numbers: what `Prediction.unknown` names; messages of a pipeline beyond one in each
direction; and what is no tensor: the allocator's fragmentation, cuBLAS's and NCCL's own memory, the interpreter.

Rajbhandari et al. 2020 (arXiv 1910.02054), section 3. Megatron-LM: `megatron/training/theoretical_memory_usage.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig, TransformerConfig
from minimegatron.config.stages import StagePlan, plan_stages
from minimegatron.footprint.dry_run import Sizes
from minimegatron.footprint.events import Unpredicted, require_known
from minimegatron.footprint.kinds import StageRun
from minimegatron.footprint.states import fsdp2_states, planned_model, states
from minimegatron.footprint.travel import Travel
from minimegatron.models.chunks import ModelChunks, schedule_of
from minimegatron.models.spec import ModuleSpec
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.pipeline.actions import Action


@dataclasses.dataclass(frozen=True)
class Fullest:
    """The bytes at one moment of a step beyond the states, and where it is."""

    activations: int
    workspace: int
    communication: int
    where: str

    @property
    def total(self) -> int:
        return self.activations + self.workspace + self.communication


class Stage:
    """A stage of the model: its tapes in the order in which they run, and the bytes that travel around each.

    Args:
        model: the stage.
        z: a microbatch.
        ddp: the wrapper with its buckets.
    """

    def __init__(self, model: Any, z: Sizes, ddp: DistributedDataParallel) -> None:
        self._model, self._z = model, z
        run = StageRun(model, z)
        self.parts, self.lasting, self.expects = run.parts, run.lasting, run.expects
        alone = model.pre_process and model.post_process
        self._message = 0 if alone else z.e * z.n_cut * z.config.hidden_size  # the next one arrives meanwhile
        self._travel = Travel(ddp, [numbers for numbers, _ in self.parts])
        self._highest: dict[tuple[bool, bool], Fullest] = {}

    @functools.cached_property
    def _split(self) -> StageRun:
        """The stage run with wgrad deferred."""
        return StageRun(self._model, self._z, splits=True)

    @property
    def kept(self) -> int:
        """Bytes of a microbatch between its forward and its backward pass."""
        return sum(tape.kept for _, tape in self.parts)

    @property
    def put_off(self) -> int:
        """Bytes that a microbatch keeps from its backward pass until its wgrad is computed."""
        return sum(tape.put_off for _, tape in self._split.parts)

    def weights_half(self) -> Fullest:
        """The fullest moment of wgrad: one gradient exists before it is added to the buffer."""
        return Fullest(self.put_off, self._split.weights, 0, "weights' half")

    def highest(self, backward: bool, splits: bool = False) -> Fullest:
        """The fullest moment of a pass; see `Tape.highest`."""
        if (backward, splits) not in self._highest:
            found = self.moments(backward, splits)
            self._highest[backward, splits] = max(found, key=lambda moment: moment.total)
        return self._highest[backward, splits]

    def moments(self, backward: bool, splits: bool = False) -> list[Fullest]:
        """The fullest moment of each part, from the first part of the stage to the last."""
        kept, found = 0, []
        later = self.put_off if splits and backward else 0
        for i, (numbers, tape) in enumerate(self._split.parts if splits else self.parts):
            here = tape.highest(backward, splits)
            later -= tape.put_off if splits and backward else 0
            layer = f", layer {'-'.join(str(n) for n in dict.fromkeys((numbers[0], numbers[-1])))}" if numbers else ""
            found.append(
                Fullest(
                    kept + later + here.kept,
                    here.workspace + self._message * backward,
                    self._travel.at(i, backward),
                    here.where + layer,
                )
            )
            kept += tape.kept
        return found


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes of one rank.

    Attributes:
        lasting: {owner: bytes} between steps.
        peak: {owner: bytes} at the fullest moment of a step.
        where: that moment, e.g. `microbatch 3: backward activation, layer 5`.
        unknown: what `peak` leaves out.
        layers: global numbers of this rank's layers.
        kept: {step: bytes} that a microbatch keeps for its backward pass, in all chunks of this rank.
        worst: bytes at the fullest moment if the experts of this rank get all tokens that they can; 0 where the peak
            does
            not depend on loads.
    """

    lasting: dict[str, int]
    peak: dict[str, int]
    where: str
    unknown: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    kept: dict[str, int] = dataclasses.field(default_factory=dict)
    worst: int = 0

    @property
    def total(self) -> int:
        return sum(self.peak.values())


@dataclasses.dataclass(frozen=True)
class Work:
    """What a rank computes in a step.

    Attributes:
        seq_length: tokens of a sample, on all ranks of cp together.
        micro_batch_size: samples of a microbatch.
        microbatches: microbatches of a rank in a step.
        documents: samples consist of documents that do not attend to each other.
        device: type of the rank's device.
    """

    seq_length: int
    micro_batch_size: int = 1
    microbatches: int = 1
    documents: bool = False
    device: str = "cpu"


def predict(
    config: TransformerConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    work: Work,
    rank: int = 0,
    world: int = 1,
    spec: ModuleSpec | None = None,
) -> Prediction:
    """Predict the memory of one rank.

    Args:
        spec: the spec of each layer; default the model's.

    Raises:
        ConfigError: the layout is not possible.
    """
    mesh = Mesh.planned(parallel, rank, world)
    plan, ddp = plan_stages(parallel, config.num_layers), planned_model(config, mesh, optimizer, spec)
    model = ddp.module
    z = sizes_of(config, mesh, optimizer, work, spec)
    lasting = fsdp2_states(model, mesh, optimizer) if parallel.use_torch_fsdp2 else states(ddp, optimizer)
    stages: Any = getattr(model, "chunks", (model,))
    layers = tuple(int(number) for stage in stages for number in stage.layers)
    try:
        require_known(
            not optimizer.freeze and config.lora_rank is None, "activations of a model with frozen parameters"
        )
        highest, kept, expects = _fullest(plan, ddp, z, work.microbatches)
        most = highest
        if expects:
            most = _fullest(plan, ddp, dataclasses.replace(z, crowded=True), work.microbatches)[0]
    except Unpredicted as what:
        return Prediction(lasting, lasting, "", (str(what),), layers)
    moving = {
        "communication": highest.communication,
        "activations": highest.activations,
        "workspace": highest.workspace,
    }
    peak = {**lasting, **{owner: n for owner, n in moving.items() if n}}
    worst = sum(lasting.values()) + most.total if most.total > highest.total else 0
    return Prediction(lasting, peak, highest.where, (), layers, kept, worst)


def sizes_of(
    config: TransformerConfig, mesh: Mesh, optimizer: OptimizerConfig, work: Work, spec: ModuleSpec | None = None
) -> Sizes:
    """The `Sizes` of a microbatch of this rank."""
    return Sizes(
        config,
        mesh,
        work.seq_length // mesh.cp.size,
        work.micro_batch_size,
        adds_products=config.dtype == optimizer.grad_dtype,
        documents=work.documents,
        device=work.device,
        spec=spec,
    )


@dataclasses.dataclass(frozen=True)
class Passage:
    """One action of a rank's schedule on one stage.

    Attributes:
        action: F, B or W of a microbatch.
        stage: the stage.
        splits: wgrad of this backward pass is deferred.
        beside: bytes that other microbatches keep meanwhile, and that stay until the step ends.
        after: bytes of activations when the action has ended.
    """

    action: Action
    stage: Stage
    splits: bool
    beside: int
    after: int

    def fullest(self) -> Fullest:
        """The fullest moment of the action."""
        stage, kind = self.stage, self.action.kind
        return self._with(stage.weights_half() if kind == "W" else stage.highest(kind == "B", self.splits))

    def moments(self) -> list[Fullest]:
        """The fullest moment of each part of the stage, in the order in which they run."""
        kind = self.action.kind
        if kind == "W":
            return [self.fullest()]
        found = [self._with(moment) for moment in self.stage.moments(kind == "B", self.splits)]
        return found[::-1] if kind == "B" else found

    def _with(self, moment: Fullest) -> Fullest:
        return dataclasses.replace(moment, activations=moment.activations + self.beside)


def passages(ddp: DistributedDataParallel, z: Sizes, row: Sequence[Action]) -> Iterator[Passage]:
    """The passage of each action of a rank's list.

    Raises:
        Unpredicted: a layer reads the value of a tensor.
    """
    model = ddp.module
    if isinstance(model, ModelChunks):
        stages = [Stage(stage, z, ddp) for _, stage in model.stages()]
    else:
        stages = [Stage(model, z, ddp)]
    split = {(action.microbatch, action.chunk) for action in row if action.kind == "W"}
    live: dict[tuple[int, int], int] = {}
    beside = sum(stage.lasting for stage in stages)
    for action in row:
        place, stage = (action.microbatch, action.chunk), stages[action.chunk]
        beside -= live.pop(place, 0)
        splits = place in split
        live[place] = stage.kept if action.kind == "F" else stage.put_off if action.kind == "B" and splits else 0
        yield Passage(action, stage, splits, beside, beside + live[place])
        beside += live[place]


def actions_of(plan: StagePlan, z: Sizes, microbatches: int) -> list[Action]:
    """The list of actions of this rank."""
    if plan.ranks == 1:
        return [Action(kind, i) for i in range(microbatches) for kind in "FB"]
    return list(schedule_of(plan, z.mesh.parallel, microbatches).actions[z.mesh.pp.rank])


def _fullest(
    plan: StagePlan, ddp: DistributedDataParallel, z: Sizes, microbatches: int
) -> tuple[Fullest, dict[str, int], bool]:
    """(Fullest moment of this rank's list, {step: bytes that a microbatch keeps}, whether both depend on loads of
    experts)."""
    most, at, stages = Fullest(0, 0, 0, ""), -1, dict[int, Stage]()
    seen = set[tuple[str, int, bool, int]]()  # most actions are alike
    for passage in passages(ddp, z, actions_of(plan, z, microbatches if plan.ranks > 1 else 1)):
        action = passage.action
        alike = action.kind, action.chunk, passage.splits, passage.beside
        if alike in seen:
            continue
        seen.add(alike)
        stages[action.chunk] = passage.stage
        here = passage.fullest()
        if here.total > most.total:
            most, at = here, action.microbatch
    if plan.ranks > 1:
        most = dataclasses.replace(most, where=f"microbatch {at}: {most.where}")
    kept: dict[str, int] = {}
    for number in sorted(stages):
        for step in (step for _, tape in stages[number].parts for step in tape):
            kept[step.name] = kept.get(step.name, 0) + step.keeps
    expects = any(stage.expects for stage in stages.values())
    return most, {name: nbytes for name, nbytes in kept.items() if nbytes}, expects
