"""The memory of every rank by name, before anything runs: states exactly, the fullest moment of a step nearly.

The problem in a sentence: a run that does not fit says so after the ranks have met and the model is built, at a tensor
that is not to blame; arithmetic says it beforehand, on a laptop, for a layout of a thousand GPUs.

| owner           | from                                                                                           |
|-----------------|------------------------------------------------------------------------------------------------|
| parameters      | the model, built on torch's `meta` device (shapes without memory) for this rank's place         |
| gradients       | its buffers with their padding, built likewise by the data-parallel wrapper (`parallel/buckets`) |
| main parameters | 4 bytes for each element of a 16-bit weight that this rank updates                             |
| moments         | AdamW 8 bytes for each element that this rank updates, SGD 4 with momentum                     |
| communication   | weights gathered for use and gradients on their way, at that moment (ZeRO-2 and -3)            |
| activations     | `models/activations`, times the microbatches under way by the pipeline's list                  |
| workspace       | what an operation needs besides, at that moment                                                |

    bytes at the fullest moment = lasting + max over the rank's actions, and their steps, of what is alive there

The operations are those of torch on a CPU; on a GPU its RMSNorm keeps less. Not predicted, and not in the numbers:
what `activations.unknown` names (`Prediction.unknown` says so), a split backward pass (zero bubble), FSDP2's buffers;
messages of a pipeline beyond one in each direction; and what is no tensor: the allocator's fragmentation, cuBLAS's and
NCCL's own memory, the interpreter. The vocabulary is the configuration's; a data set may bring another.

Rajbhandari et al. 2020 (arXiv 1910.02054), section 3. Megatron-LM: `megatron/training/theoretical_memory_usage.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, TransformerConfig
from minimegatron.config.stages import SPLIT, StagePlan, plan_stages
from minimegatron.models import activations as a
from minimegatron.models.chunks import ModelChunks, schedule_of
from minimegatron.models.decoder import GPTModel
from minimegatron.parallel.ddp import DistributedDataParallel
from minimegatron.training.rules import batch_sizes
from minimegatron.training.run import RunConfig


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes of one rank.

    Attributes:
        lasting: {owner: bytes} between steps.
        peak: the same at the fullest moment of a step.
        where: that moment, e.g. `microbatch 3: backward activation, layer 5`.
        unknown: what is not in `peak`.
    """

    lasting: dict[str, int]
    peak: dict[str, int]
    where: str
    unknown: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.peak.values())


@dataclasses.dataclass(frozen=True)
class Moment:
    """A candidate for the fullest moment: what is alive beyond the states."""

    activations: int
    workspace: int
    communication: int
    where: str

    @property
    def total(self) -> int:
        return self.activations + self.workspace + self.communication


def predict(run: RunConfig, rank: int = 0, world: int = 1, device: str = "cpu") -> Prediction:
    """The memory of one rank of a run on devices of this type.

    Raises:
        ConfigError: the layout cannot be.
    """
    mesh, config = Mesh.planned(run.parallel, rank, world), run.model
    plan = plan_stages(run.parallel, config.num_layers)
    with torch.device("meta"):
        model = GPTModel(config, mesh) if mesh.pp.size == 1 else ModelChunks(config, mesh)
    lacking = a.unknown(config, mesh.cp.size, device)
    lacking += ["a split backward pass"] * (plan.schedule in SPLIT and plan.ranks > 1)
    if run.parallel.use_torch_fsdp2:
        states = _fsdp2(model, mesh, run.optimizer)
        return Prediction(states, states, "", (*lacking, "FSDP2's buffers"))
    parallel = run.parallel
    ddp = DistributedDataParallel(
        model,
        mesh,
        parallel.ddp_bucket_size,
        parallel.overlap_grad_reduce,
        sharding=parallel.data_parallel_sharding_strategy,
        overlap_param_gather=parallel.overlap_param_gather,
    )
    lasting = _states(ddp, run.optimizer)
    if lacking:
        return Prediction(lasting, lasting, "", tuple(lacking))
    microbatches = batch_sizes(run.training, mesh.dp.size).at(0)
    highest = _fullest(run, mesh, plan, ddp, microbatches)
    moving = {
        "communication": highest.communication,
        "activations": highest.activations,
        "workspace": highest.workspace,
    }
    return Prediction(lasting, {**lasting, **{owner: n for owner, n in moving.items() if n}}, highest.where)


# ------------------------------------------------------------------------------------------------------ states


def _states(ddp: DistributedDataParallel, config: OptimizerConfig) -> dict[str, int]:
    """{owner: bytes} that last from step to step."""
    held = ddp.held()
    fleeting = {whole.untyped_storage()._cdata for whole in held.pop("communication", [])}
    found = {owner: _bytes(tensors, fleeting) for owner, tensors in held.items()}
    shards = list(ddp.shards().values())
    half = [s for s in shards if s.data.dtype in (torch.bfloat16, torch.float16)]
    found["main parameters"] = 4 * sum(s.data.numel() for s in half)
    found["moments"] = _moments(config) * sum(s.data.numel() for s in shards)
    return {owner: nbytes for owner, nbytes in found.items() if nbytes}


def _moments(config: OptimizerConfig) -> int:
    """Bytes for each element that is updated."""
    return 8 if config.optimizer == "adam" else 4 * (config.sgd_momentum > 0)


def _bytes(tensors: Iterable[torch.Tensor], without: set[int] = frozenset()) -> int:  # type: ignore[assignment]
    """Of storages, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for key, nbytes in storages.items() if key not in without)


def _fsdp2(model: nn.Module, mesh: Mesh, config: OptimizerConfig) -> dict[str, int]:
    """`fully_shard` cuts every parameter by rows, in fp32 whatever the model computes in."""
    count = 0
    for param in model.parameters():
        rows = math.ceil(param.shape[0] / mesh.dp_cp.size)
        mine = min(max(param.shape[0] - rows * mesh.dp_cp.rank, 0), rows)
        count += mine * (param.numel() // param.shape[0])
    return {"parameters": 4 * count, "gradients": 4 * count, "moments": _moments(config) * count}


# ----------------------------------------------------------------------------------------------- a step's moments


def _fullest(run: RunConfig, mesh: Mesh, plan: StagePlan, ddp: DistributedDataParallel, microbatches: int) -> Moment:
    """The fullest moment of this rank's list of forward and backward passes."""
    config, rank = run.model, mesh.pp.rank
    separate = config.dtype != torch.float32  # gradients are added up in fp32
    s = run.data.seq_length // mesh.cp.size
    z = a.Sizes(s, run.training.micro_batch_size, mesh.tp.size, mesh.sequence_parallel, config.dtype.itemsize, separate)
    if mesh.pp.size == 1:
        chunks = [Chunk(config, z, plan.layers[0], True, True, ddp)]
        actions = [("F", 0, 0), ("B", 0, 0)]
    else:
        model = ddp.module
        assert isinstance(model, ModelChunks), "a pipeline rank holds stages"
        chunks = [
            Chunk(config, z, plan.layers[stage], chunk.pre_process, chunk.post_process, ddp)
            for stage, chunk in model.stages()
        ]
        row = schedule_of(plan, run.parallel, microbatches).actions[rank]
        actions = [(action.kind, action.microbatch, action.chunk) for action in row]
    live: dict[tuple[int, int], int] = {}
    found = [Moment(0, 0, 0, "")]
    for kind, microbatch, number in actions:
        others = sum(kept for key, kept in live.items() if key != (microbatch, number))
        chunk = chunks[number]
        here = chunk.highest(kind != "F")
        where = f"microbatch {microbatch}: {here.where}" if mesh.pp.size > 1 else here.where
        found.append(dataclasses.replace(here, activations=here.activations + others, where=where))
        live[microbatch, number] = chunk.kept if kind == "F" else 0
    return max(found, key=lambda moment: moment.total)


class Chunk:
    """A stage of the model: its tapes in the order in which they run, and what travels around each.

    Args:
        layers: global numbers of its layers.
        first, last: the embedding, the loss are here.
        ddp: whose buckets come and go.
    """

    def __init__(
        self,
        config: TransformerConfig,
        z: a.Sizes,
        layers: tuple[int, ...],
        first: bool,
        last: bool,
        ddp: DistributedDataParallel,
    ) -> None:
        message = z.stream(config.hidden_size)
        arrives = message if z.e < 4 and config.normalization == "RMSNorm" else 0  # else the first norm has kept it
        begin = a.Tape([a.batch(config, z), *(a.embedding(config, z) if first else [a.Step("input", arrives)])])
        end = a.output(config, z) if last else a.Tape()
        groups = a.layers(config, z, layers)
        self.parts: list[tuple[tuple[int, ...], a.Tape]] = [((), begin), *groups, ((), end)]
        self._ends = 0 if first and last else message  # the gradient that came, or goes
        self._travel = _Travel(ddp, [numbers for numbers, _ in self.parts])

    @property
    def kept(self) -> int:
        return sum(tape.kept for _, tape in self.parts)

    def highest(self, backward: bool) -> Moment:
        """The fullest moment of a pass."""
        kept, found = 0, []
        for i, (numbers, tape) in enumerate(self.parts):
            here = tape.highest(backward)
            layer = f", layer {'-'.join(str(n) for n in dict.fromkeys((numbers[0], numbers[-1])))}" if numbers else ""
            found.append(
                Moment(
                    kept + here.kept,
                    here.workspace + self._ends * backward,
                    self._travel.at(i, backward),
                    here.where + layer,
                )
            )
            kept += tape.kept
        return max(found, key=lambda moment: moment.total)


class _Travel:
    """Bytes of gathered weights and of gradients on their way, at each part of a stage.

    Args:
        ddp: its buckets.
        parts: numbers of the layers of each part; none at both ends, which hold what is in no layer.
    """

    def __init__(self, ddp: DistributedDataParallel, parts: list[tuple[int, ...]]) -> None:
        self._parts, self._overlap = parts, ddp.overlap
        tied = not ddp.module.get_submodule("").config.untie_embeddings_and_output_weights  # type: ignore[union-attr]
        self._grads: list[tuple[int, int, int]] = []  # first part, last part, bytes
        self._weights: dict[int, int] = {}  # of each layer, and under -1 of the rest
        for buffer in ddp.grad_buffers:
            for bucket in buffer.buckets:
                places = [place for name in bucket.members for place in self._places(name, tied)]
                if buffer.fleeting and places:
                    nbytes = bucket.span.size * buffer.data.element_size()
                    self._grads.append((min(places), max(places), nbytes))
                if ddp.sharding == "optim_grads_params" and places:
                    name, param = next((n, buffer.params[n]) for n in bucket.members)
                    layer = _layer_of(name)
                    nbytes = bucket.span.size * param.element_size()
                    self._weights[layer] = self._weights.get(layer, 0) + nbytes

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
        if backward:
            total += sum(n for first, last, n in self._grads if first - self._overlap <= part <= last)
        return total


def _layer_of(name: str) -> int:
    """The layer that a logical name is of, or -1."""
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else -1
