"""Everything of a run that must survive its end, as logical tensors and plain values; and back.

The problem in a sentence: a run that goes on must be the one that ended, and what it forgets, a scale, a counter, a
generator, no error will tell.

| part                         | name in the checkpoint           | holds in another layout                       |
|------------------------------|----------------------------------|-----------------------------------------------|
| weights, frozen ones too     | `model.<logical name>`           | yes, without the vocabulary's padding         |
| buffers: FP8 scales, history | `model.<logical name>`           | yes, they are equal where they are held twice |
| optimizer, main parameters   | `optimizer.<key>.<logical name>` | yes: moments lie where the weights lie        |
| random streams               | `rng.<stream>.<device>`          | no, a row for each rank: new ones, and it is said |
| counters, schedule, scaler   | `state` of the manifest          | yes                                           |
| the model's configuration    | `state` of the manifest          | what changes the mathematics must be equal    |

Where the data stands is a counter: the order of samples is a function of the seed and of how many were consumed.

Megatron-LM: `generate_state_dict` and `load_checkpoint` in `megatron/training/checkpointing.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from minimegatron.checkpoint.manifest import Manifest
from minimegatron.checkpoint.regions import Logical, Region, logical_shape, regions
from minimegatron.checkpoint.shard_file import DTYPES
from minimegatron.comm.agree import gather_objects
from minimegatron.comm.axis import Axis
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.random import RngStreams
from minimegatron.errors import CheckpointError, did_you_mean
from minimegatron.layers.param import layout_of, logical_buffers, logical_parameters
from minimegatron.optim.optimizer import MixedPrecisionOptimizer
from minimegatron.parallel.data_parallel import DataParallel

if TYPE_CHECKING:
    from minimegatron.training.trainer import Trainer

# Fields of the model that change how it is computed and not what; all others must be those of the checkpoint.
MAY_CHANGE = {
    "attention_backend", "transformer_impl", "kernels", "recompute_granularity", "recompute_method",
    "recompute_num_layers", "recompute_modules", "make_vocab_size_divisible_by", "hidden_dropout", "attention_dropout",
    "init_method_std", "scale_output_init", "moe_token_dispatcher_type", "moe_grouped_gemm",
    "moe_shared_expert_overlap", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate",
    "moe_input_jitter_eps", "mtp_loss_scaling_factor",
}  # fmt: skip


def model_tensors(model: DataParallel) -> dict[str, Logical]:
    """Weights and buffers; of sharded weights this rank's pieces.

    Where the model's own weights are the main parameters (`rounds_to`), these are copies, rounded to the model's dtype,
    and `optimizer_tensors` has the weights: so a checkpoint is the same whoever wrote it.
    """
    found: dict[str, Logical] = {}
    shards = model.shards()
    for name, param in logical_parameters(model):
        layout = layout_of(param)
        dtype = param.dtype
        if param.requires_grad:
            shard, dtype = shards.get(name), model.rounds_to or dtype
            parts = [] if shard is None else regions(layout, shard.data.to(dtype), shard.piece)
        else:
            parts = regions(layout, param.detach())
        if layout.shared and f"model.{name}" in found:
            continue  # the original is here too, and they share memory
        found[f"model.{name}"] = Logical(logical_shape(layout), parts, dtype)
    for name, buffer in logical_buffers(model):
        found[f"model.{name}"] = _whole(buffer)
    return found


def take_rounded(model: DataParallel, tensors: Mapping[str, Logical]) -> None:
    """A checkpoint was read into `model_tensors` without `optimizer_tensors`: rounded copies become the weights."""
    params = model.params
    for name, shard in model.shards().items() if model.rounds_to is not None else ():
        mine = regions(layout_of(params[name]), shard.data, shard.piece)
        for part, read in zip(mine, tensors[f"model.{name}"].parts, strict=True):
            part.data.copy_(read.data)


def optimizer_tensors(
    optimizer: MixedPrecisionOptimizer, state: Mapping[str, Any], rounded: bool = False
) -> dict[str, Logical]:
    """Moments, steps and main parameters of `optimizer.state_dict()`, where their parameters lie.

    Args:
        state: of `state_dict()`: what is read into these tensors is the optimizer's when it has loaded them.
        rounded: also main parameters that are the model's.
    """
    found: dict[str, Logical] = {}
    for p in optimizer.params:
        layout = layout_of(p.model)
        itself = {"fp32_param": p.main.detach()} if rounded else {}
        for key, tensor in (state[p.name] | itself).items():
            name = f"optimizer.{key}.{p.name}"
            if tensor.dim() == 0:
                found[name] = _whole(tensor)
            else:
                found[name] = Logical(logical_shape(layout), regions(layout, tensor, p.piece), tensor.dtype)
    return found


def rng_tensors(rng: RngStreams, world: Axis) -> dict[str, Logical]:
    """A row for each rank; a generator that is loaded is put back by `load_state_dict` of what is returned."""
    found: dict[str, Logical] = {}
    for stream, devices in rng.state_dict().items():
        for device, state in devices.items():
            box = ((world.rank, world.rank + 1), (0, state.numel()))
            row = Region(box, state.clone().view(1, -1))
            found[f"rng.{stream}.{device}"] = Logical((world.size, state.numel()), [row], torch.uint8)
    return found


def _whole(tensor: torch.Tensor) -> Logical:
    box = tuple((0, n) for n in tensor.shape)
    return Logical(tensor.shape, [Region(box, tensor)], tensor.dtype)


def tensors_of(trainer: Trainer, optim: bool, rng: bool, state: Mapping[str, Any] | None = None) -> dict[str, Logical]:
    """All tensors of a run; `state`: those of its optimizer, if a reader is to fill them."""
    found = model_tensors(trainer.model)
    if optim:
        state = trainer.optimizer.state_dict()["state"] if state is None else state
        found |= optimizer_tensors(trainer.optimizer, state, rounded=trainer.model.rounds_to is not None)
    if rng:
        found |= rng_tensors(trainer.rng, trainer.mesh.world)
    return found


def changed_by_passes(trainer: Trainer, tensors: Mapping[str, Logical]) -> set[str]:
    """Names of the tensors of a run that change before the optimizer moves; those of streams are copies already."""
    return {name for n, _ in logical_buffers(trainer.model) if (name := f"model.{n}") in tensors}


def state_of(trainer: Trainer) -> dict[str, Any]:
    """All that is no tensor."""
    return {
        "counters": dataclasses.asdict(trainer.state),
        "validation_loss": trainer.state.validation_loss,
        "scheduler": trainer.scheduler.state_dict(),
        "grad_scaler": trainer.optimizer.state_dict()["grad_scaler"],
        "model": trainer.run.model.to_dict(),
        "layout": layout_facts(trainer.mesh),
        "seed": trainer.run.training.seed,
    }


def layout_facts(mesh: Mesh) -> dict[str, int]:
    """What random streams depend on: ranks on each axis."""
    return {name: mesh.axis(name).size for name in ("tp", "cp", "pp", "dp", "ep", "world")}


def check_same_model(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        CheckpointError: names the fields that differ, with both values.
    """
    saved, ours = dict(saved), dict(ours)
    said = set() if ours["position_embedding_type"] == "learned_absolute" else {"max_position_embeddings"}  # no size
    differs = [
        f"{name}: checkpoint {saved.get(name)!r}, now {ours.get(name)!r}"
        for name in sorted((saved.keys() | ours.keys()) - MAY_CHANGE - said)
        if saved.get(name) != ours.get(name)
    ]
    if differs:
        raise CheckpointError(
            "the checkpoint is of another model:\n  " + "\n  ".join(differs[:12]),
            fix="give the flags of the run that wrote it, or another folder",
        )


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
            mine = next(n for n, d in DTYPES.items() if d == tensor.dtype)
            problems.append(f"{name}: checkpoint {stored.dtype} {stored.shape}, now {mine} {tuple(tensor.shape)}")
    names, found = zip(*gather_objects((set(wanted), problems), world), strict=True)
    problems, everyone = list(dict.fromkeys(p for of_rank in found for p in of_rank)), set().union(*names)
    left = [n for n in manifest.tensors if n not in everyone and not n.startswith(tuple(skipped))]
    problems += [f"{name} is in it, and nothing here wants it" for name in left]
    if problems:
        shown = problems[:12] + ([f"and {len(problems) - 12} more"] if len(problems) > 12 else [])
        raise CheckpointError(
            "the checkpoint does not fit this run:\n  " + "\n  ".join(shown),
            fix="the same model, precision and optimizer; --no-load-optim takes the weights without the optimizer",
        )
