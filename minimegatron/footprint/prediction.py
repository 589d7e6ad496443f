"""The memory of every rank by name, before anything runs: states exactly, the fullest moment of a step nearly.

The problem in a sentence: a run that does not fit says so after the ranks have met and the model is built, at a tensor
that is not to blame; a plan says it beforehand, on a laptop, for a layout of a thousand GPUs.

    bytes at the fullest moment = lasting + max over the rank's actions, and their steps, of what is alive there

| owner           | from                                                                                             |
|-----------------|--------------------------------------------------------------------------------------------------|
| parameters      | the model, built on torch's `meta` device for this rank's place                                    |
| gradients       | its buffers with their padding, built likewise by `parallel/data/ddp` (`parallel/data/buckets`)   |
| main parameters | the optimizer, built likewise over what this rank updates                                          |
| moments         | likewise; `... (host)` is the memory of the host (`--optimizer-cpu-offload`)                       |
| communication   | weights gathered for use, gradients on their way (ZeRO-2 and -3)                                   |
| activations     | a run on fake tensors (`dry_run`): what a microbatch keeps, times those that are under way         |
| workspace       | the same: what is alive besides at the fullest moment                                              |

**Communication.** A gradient that is kept in shards exists whole from its first parameter's backward pass until its
bucket has travelled; with overlap one part longer. Weights kept in shards are whole while their part runs, with those
of the next part, which are fetched meanwhile. Torch's FSDP2 gathers weights likewise. Its gradients of a layer are
whole in the dtype of the weights, a third of them at the layer's fullest moment, which is in its MLP; those outside of
layers until the end. In fp32 are the input of the sum over ranks, which stays until the next layer's, and the shards of
all microbatches so far, beside the buffer.

**What is compared.** Tests count live tensors on a CPU, where torch's operations or the package's emulated kernels
compute. For a GPU the same kernels are taken, and an attention that keeps q, k, v, its output and log-sum-exp (`gpu`);
no GPU's tensors have been counted against it yet. Experts are taken to get equal loads, beside the worst case.

Not predicted, and not in the numbers: what `Prediction.unknown` names; messages of a pipeline beyond one in each
direction; and what is no tensor: the allocator's fragmentation, cuBLAS's and NCCL's own memory, the interpreter.

Rajbhandari et al. 2020 (arXiv 1910.02054), section 3. Megatron-LM: `megatron/training/theoretical_memory_usage.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig, TransformerConfig
from minimegatron.config.stages import StagePlan, plan_stages
from minimegatron.footprint.dry_run import Sizes, StageRun, Unpredicted, require_known
from minimegatron.layers.param import logical_parameters
from minimegatron.models.block import TransformerBlock
from minimegatron.models.chunks import ModelChunks, build_chunks, schedule_of
from minimegatron.models.spec import ModuleSpec
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.groups import frozen
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.pipeline.actions import Action


def states(ddp: DistributedDataParallel, config: OptimizerConfig) -> dict[str, int]:
    """{owner: bytes} that last from step to step."""
    held = ddp.held()
    fleeting = {whole.untyped_storage()._cdata for whole in held.pop("communication", [])}
    found = {owner: _bytes(tensors, fleeting) for owner, tensors in held.items()}
    optimizer = build_optimizer(config, ddp, ddp.mesh, ddp.shards())
    found |= {owner: _bytes(tensors, set()) for owner, tensors in optimizer.held().items()}
    return {owner: nbytes for owner, nbytes in found.items() if nbytes}


def fsdp2_states(model: nn.Module, mesh: Mesh, config: OptimizerConfig) -> dict[str, int]:
    """`fully_shard` cuts every parameter by rows, in fp32 whatever the model computes in."""
    count = 0
    for param in model.parameters():
        rows = math.ceil(param.shape[0] / mesh.dp_cp.size)
        mine = min(max(param.shape[0] - rows * mesh.dp_cp.rank, 0), rows)
        count += mine * (param.numel() // param.shape[0])
    moments = sum({"fp32": 4, "fp8": 1}.get(dtype, 2) for dtype in (config.exp_avg_dtype, config.exp_avg_sq_dtype))
    if config.optimizer != "adam":
        moments = 4 * (config.sgd_momentum > 0)
    return {"parameters": 4 * count, "gradients": 4 * count, "moments": moments * count}


def _bytes(tensors: Iterable[torch.Tensor], without: set[int]) -> int:
    """Of storages, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for key, nbytes in storages.items() if key not in without)


class Travel:
    """Bytes of gathered weights and of gradients on their way, at each part of a stage.

    Args:
        ddp: its buckets.
        parts: numbers of the layers of each part; none at both ends, which hold what is in no layer.
    """

    def __init__(self, ddp: DistributedDataParallel, parts: list[tuple[int, ...]]) -> None:
        self._parts, self._overlap = parts, ddp.overlap
        tied = not ddp.module.get_submodule("").config.untie_embeddings_and_output_weights  # type: ignore[union-attr]
        self._fsdp2 = ddp.mesh.parallel.use_torch_fsdp2
        self._grads: list[tuple[int, int, int]] = []  # first part, last part, bytes
        self._by_torch: list[tuple[int, int, bool, int, float]] = []  # and whether in a layer, of weights, of shards
        self._weights: dict[int, int] = {}  # of each layer, and under -1 of the rest
        for buffer in ddp.grad_buffers:
            for bucket in buffer.buckets:
                places = [place for name in bucket.members for place in self._places(name, tied)]
                if buffer.temporary and places:
                    nbytes = bucket.span.size * buffer.data.element_size()
                    self._grads.append((min(places), max(places), nbytes))
                if ddp.sharding == "optim_grads_params" and places:
                    name, param = next((n, buffer.params[n]) for n in bucket.members)
                    layer = _layer_of(name)
                    nbytes = bucket.span.size * param.element_size()
                    self._weights[layer] = self._weights.get(layer, 0) + nbytes
                    shards = bucket.span.size * 4 / buffer.axis.size
                    self._by_torch.append((min(places), max(places), layer >= 0, nbytes, shards))

    def _places(self, name: str, tied: bool) -> list[int]:
        """The parts that use a parameter; none where it is in another stage of this rank."""
        layer, last = _layer_of(name), len(self._parts) - 1
        if layer >= 0:
            return [i for i, numbers in enumerate(self._parts) if layer in numbers]
        if name.startswith("embedding.word") and tied:
            return [0, last]
        return [0] if name.startswith("embedding.") else [last]

    def at(self, part: int, backward: bool) -> int:
        """While this part runs."""
        numbers, weights = self._parts[part], self._weights
        nearby = self._parts[part - 1 if backward else part + 1] if 0 < part < len(self._parts) - 1 else ()
        if part == 0 and not backward:
            nearby = self._parts[1]
        if part == len(self._parts) - 1 and backward:
            nearby = self._parts[part - 1]
        neighbour = nearby[-1:] if backward else nearby[:1]
        whole = numbers if backward else numbers[:2]  # a group that is computed again stays together
        total = sum(weights.get(n, 0) for n in {*whole, *neighbour, -1}) if weights else 0
        if backward and self._fsdp2:
            return total + self._gradients_of_torch(part)
        if backward:
            total += sum(n for first, last, n in self._grads if first - self._overlap <= part <= last)
        return total

    def _gradients_of_torch(self, part: int) -> int:
        """See the module docstring."""
        total = 0.0
        for (first, last, in_layer, nbytes, shards), (*_, wide) in zip(self._by_torch, self._grads, strict=True):
            total += shards + (wide if in_layer and first == part + 1 else 0)
            total += nbytes / 3 if in_layer and first <= part <= last else 0 if in_layer or last < part else nbytes
        return int(total)


def _layer_of(name: str) -> int:
    """The layer that a logical name is of, or -1; depths of `models/mtp` are behind all layers."""
    found = re.search(r"(?<!mtp\.)layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


@dataclasses.dataclass(frozen=True)
class Fullest:
    """A candidate for the fullest moment of a step: what is alive beyond the states."""

    activations: int
    workspace: int
    communication: int
    where: str

    @property
    def total(self) -> int:
        return self.activations + self.workspace + self.communication


class Stage:
    """A stage of the model: its tapes in the order in which they run, and what travels around each.

    Args:
        model: the stage.
        z: a microbatch.
        ddp: whose buckets come and go.
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
        """Where the weights' half of the backward pass is put off."""
        return StageRun(self._model, self._z, splits=True)

    @property
    def kept(self) -> int:
        """Bytes of a microbatch between its forward and its backward pass."""
        return sum(tape.kept for _, tape in self.parts)

    @property
    def put_off(self) -> int:
        """Bytes of a microbatch between the two halves of a split backward pass."""
        return sum(tape.put_off for _, tape in self._split.parts)

    def weights_half(self) -> Fullest:
        """The fullest moment of the weights' half of a backward pass: one gradient exists before it is added up."""
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
        peak: the same at the fullest moment of a step.
        where: that moment, e.g. `microbatch 3: backward activation, layer 5`.
        unknown: what is not in `peak`.
        layers: global numbers of the layers that are here.
        kept: {step: bytes} that a microbatch keeps for its backward pass, in all chunks of this rank.
        worst: bytes at the fullest moment if the experts of this rank get all tokens that they can; 0: there is
            nothing in the data that moves the peak.
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
        microbatches: of a rank in a step.
        documents: samples are made of documents that do not see each other.
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
    """The memory of one rank.

    Args:
        spec: of each layer; default the model's.

    Raises:
        ConfigError: the layout cannot be.
    """
    mesh = Mesh.planned(parallel, rank, world)
    model = meta_model(config, mesh, optimizer, spec)
    plan, ddp = plan_stages(parallel, config.num_layers), meta_wrapper(model, mesh, optimizer)
    z = sizes_of(config, mesh, optimizer, work, spec)
    lasting = fsdp2_states(model, mesh, optimizer) if parallel.use_torch_fsdp2 else states(ddp, optimizer)
    layers = tuple(int(n) for m in model.modules() if isinstance(m, TransformerBlock) for n in m.layers)
    try:
        require_known(not optimizer.freeze, "activations of a model with frozen parameters")
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


def meta_model(
    config: TransformerConfig, mesh: Mesh, optimizer: OptimizerConfig, spec: ModuleSpec | None = None
) -> Any:
    """What a rank holds of the model, shapes without memory."""
    with torch.device("meta"):
        model = build_chunks(config, mesh, spec)
    for name, param in logical_parameters(model):
        param.requires_grad_(param.requires_grad and not frozen(name, optimizer))
    return model


def meta_wrapper(model: Any, mesh: Mesh, optimizer: OptimizerConfig) -> DistributedDataParallel:
    """The same with the buckets of its gradients."""
    parallel = mesh.parallel
    return DistributedDataParallel(
        model,
        mesh,
        parallel.ddp_bucket_size,
        parallel.overlap_grad_reduce,
        sharding=parallel.data_parallel_sharding_strategy,
        overlap_param_gather=parallel.overlap_param_gather,
        grad_dtype=optimizer.grad_dtype,
    )


def sizes_of(
    config: TransformerConfig, mesh: Mesh, optimizer: OptimizerConfig, work: Work, spec: ModuleSpec | None = None
) -> Sizes:
    """A microbatch of this rank."""
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
    """A stage while one action of its rank runs.

    Attributes:
        action: F, B or W of a microbatch.
        stage: that it goes through.
        splits: the weights' half of this backward pass is put off.
        beside: bytes that other microbatches keep meanwhile, and that stay until the step ends.
        after: bytes of activations when it has ended.
    """

    action: Action
    stage: Stage
    splits: bool
    beside: int
    after: int

    def fullest(self) -> Fullest:
        """Its fullest moment."""
        stage, kind = self.stage, self.action.kind
        return self._with(stage.weights_half() if kind == "W" else stage.highest(kind == "B", self.splits))

    def moments(self) -> list[Fullest]:
        """The fullest of each part of the stage, in the order in which they run."""
        kind = self.action.kind
        if kind == "W":
            return [self.fullest()]
        found = [self._with(moment) for moment in self.stage.moments(kind == "B", self.splits)]
        return found[::-1] if kind == "B" else found

    def _with(self, moment: Fullest) -> Fullest:
        return dataclasses.replace(moment, activations=moment.activations + self.beside)


def passages(ddp: DistributedDataParallel, z: Sizes, row: Sequence[Action]) -> Iterator[Passage]:
    """A rank's list of actions, and what is alive beyond the states in each.

    Raises:
        Unpredicted: a layer wants to read numbers.
    """
    model = ddp.module
    if isinstance(model, ModelChunks):
        stages = [Stage(stage, z, ddp) for _, stage in model.stages()]
    else:
        stages = [Stage(model, z, ddp)]
    split = {(action.microbatch, action.chunk) for action in row if action.kind == "W"}
    live: dict[tuple[int, int], int] = {}
    lasting = sum(stage.lasting for stage in stages)
    for action in row:
        place, stage = (action.microbatch, action.chunk), stages[action.chunk]
        beside = lasting + sum(live.values()) - live.get(place, 0)
        splits = place in split
        live[place] = stage.kept if action.kind == "F" else stage.put_off if action.kind == "B" and splits else 0
        yield Passage(action, stage, splits, beside, beside + live[place])


def actions_of(plan: StagePlan, z: Sizes, microbatches: int) -> list[Action]:
    """The list of this rank."""
    if plan.ranks == 1:
        return [Action(kind, i) for i in range(microbatches) for kind in "FB"]
    return list(schedule_of(plan, z.mesh.parallel, microbatches).actions[z.mesh.pp.rank])


def _fullest(
    plan: StagePlan, ddp: DistributedDataParallel, z: Sizes, microbatches: int
) -> tuple[Fullest, dict[str, int], bool]:
    """The fullest moment of this rank's list of forward and backward passes, what a microbatch keeps, and whether both
    depend on the loads of experts."""
    most, at, stages = Fullest(0, 0, 0, ""), -1, dict[int, Stage]()
    for passage in passages(ddp, z, actions_of(plan, z, microbatches if plan.ranks > 1 else 1)):
        stages[passage.action.chunk] = passage.stage
        here = passage.fullest()
        if here.total > most.total:
            most, at = here, passage.action.microbatch
    if plan.ranks > 1:
        most = dataclasses.replace(most, where=f"microbatch {at}: {most.where}")
    kept: dict[str, int] = {}
    for number in sorted(stages):
        for step in (step for _, tape in stages[number].parts for step in tape):
            kept[step.name] = kept.get(step.name, 0) + step.keeps
    expects = any(stage.expects for stage in stages.values())
    return most, {name: nbytes for name, nbytes in kept.items() if nbytes}, expects
