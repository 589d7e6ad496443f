"""A training of Megatron's that is saved in its middle, with the optimizer, and goes on.

Three steps, a checkpoint with what Megatron-LM puts into one (`generate_state_dict` in
`megatron/training/checkpointing.py`), two more steps. Every step has batches of its own and another learning rate, so
a reader that loses the position in the data, the schedule, the step or a moment does not repeat the last two.

`trained.json`, beside the checkpoint's folder `iter_0000003`:

| field     | holds                                                                                                    |
|-----------|----------------------------------------------------------------------------------------------------------|
| `state`   | SHA-256 of each logical tensor, by what it is and its name: `exp_avg decoder.layers.0.mlp...`            |
| `trace`   | of each of the five steps: mean loss before it, norm of the gradient before clipping                     |
| `last`    | of each main parameter after the last step: its norm, and a number that all its elements have a part in  |
| `flags`   | of a run that goes on: schedule and optimizer                                                            |

`state` is put together from what the ranks hold, by the rules of `gpt._fill`, without Megatron's checkpoint.

    python -m tests.oracle.trained FOLDER llama 2 1 2 fully_reshardable         tp 2, pp 1, dp 2
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.golden import megatron_names
from tests.oracle import gpt, ranks, torch_dist, zero

BEFORE, AFTER, MICROBATCHES = 3, 2, 4
DATA = {**gpt.DATA, "microbatches": MICROBATCHES * (BEFORE + AFTER)}
BATCH = MICROBATCHES * DATA["micro_batch_size"]
SAMPLES = BATCH * (BEFORE + AFTER)
FLAGS = (
    f"--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-decay-iters {BEFORE + AFTER} --weight-decay 0.01 "
    f"--clip-grad 1.0 --train-iters {BEFORE + AFTER} --global-batch-size {BATCH} "
    f"--micro-batch-size {DATA['micro_batch_size']} --seq-length {DATA['seq_length']}"
)
Pieces = list[tuple[str, str, int, int, int, torch.Tensor]]  # what, name, dim that is cut, tp rank, first element


def samples() -> torch.Tensor:
    """Tokens [samples, sequence + 1] in the order in which they are consumed."""
    return megatron_names.seeded_batches(DATA).flatten(0, 1)


def _optimizer(built: torch.nn.Module, sharded: bool, half: bool) -> tuple[torch.nn.Module, Any, Any]:
    """The model wrapped, its optimizer and its schedule."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.module import Float16Module

    config: Any = built.config
    if half:
        config.bf16, config.params_dtype = True, torch.bfloat16
        built = Float16Module(config, built)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(config, settings, built)
    config.finalize_model_grads_func = finalize_model_grads
    known = {k: v for k, v in gpt.OPTIMIZER.items() if k != "lr_decay_style"}
    known |= {"min_lr": 3e-4, "use_distributed_optimizer": sharded, "bf16": half, "params_dtype": config.params_dtype}
    optimizer = get_megatron_optimizer(OptimizerConfig(**known), [ddp])
    config.grad_scale_func = optimizer.scale_loss
    schedule = OptimizerParamScheduler(
        optimizer, 0.0, 3e-3, 3e-4, 0, SAMPLES, "cosine", 0.01, 0.01, SAMPLES, "constant"
    )
    return ddp, optimizer, schedule


def _step(ddp: torch.nn.Module, optimizer: Any, schedule: Any, number: int, tp: int) -> list[float]:
    from megatron.core import parallel_state as state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ddp.zero_grad_buffer()  # type: ignore[operator]
    optimizer.zero_grad()
    batches = megatron_names.seeded_batches(DATA)[number * MICROBATCHES : (number + 1) * MICROBATCHES]
    mine = batches[state.get_data_parallel_rank() :: state.get_data_parallel_world_size()]
    losses = get_forward_backward_func()(
        forward_step_func=gpt._forward_step,
        data_iterator=iter(mine),
        model=ddp,
        num_microbatches=len(mine),
        seq_length=DATA["seq_length"],
        micro_batch_size=DATA["micro_batch_size"],
        forward_only=False,
    )
    _, norm, _ = optimizer.step()
    schedule.step(BATCH)
    total = torch.tensor(sum(loss["loss"].item() for loss in losses), dtype=torch.float64)
    dist.all_reduce(total)
    return [total.item() / tp / MICROBATCHES, float(norm)]


def _held(optimizer: Any, named: dict[str, torch.nn.Parameter]) -> Pieces:
    """Moments and main parameters of this rank, flat."""
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    (inner,) = optimizer.chained_optimizers if hasattr(optimizer, "chained_optimizers") else [optimizer]
    found: Pieces = []
    for name, param in named.items():
        first, main = 0, getattr(param, "main_param", None)
        if isinstance(inner, DistributedOptimizer):
            if param not in inner.model_param_group_index_map:
                continue
            first = inner._get_model_param_range_map(param)["param"].start
            group, place = inner.model_param_group_index_map[param]
            main = inner.optimizer.param_groups[group]["params"][place]
        main = param if main is None else main
        state = inner.optimizer.state[main]
        assert state["step"].item() >= BEFORE
        cut = param.partition_dim if getattr(param, "tensor_model_parallel", False) else -1
        place = parallel_state.get_tensor_model_parallel_rank() if cut >= 0 else 0
        for what, tensor in {**state, "fp32_param": main.detach()}.items():
            if what != "step":
                found.append((what, name, cut, place, first, tensor.reshape(-1).clone()))
    return found


def _together(pieces: list[Pieces], model: dict[str, Any], tp: int) -> dict[str, torch.Tensor]:
    """Logical tensors from what all ranks hold."""
    shapes = megatron_names.parameter_shapes(model)
    parts: dict[str, dict[int, torch.Tensor]] = {}
    cuts: dict[str, int] = {}
    for what, name, cut, place, first, flat in (piece for of_rank in pieces for piece in of_rank):
        local = [n // tp if dim == cut else n for dim, n in enumerate(shapes[name])]
        parts.setdefault(f"{what} {name}", {}).setdefault(place, torch.full(local, torch.nan))
        parts[f"{what} {name}"][place].view(-1)[first : first + len(flat)] = flat
        cuts[f"{what} {name}"] = cut
    found = {}
    for key, of_ranks in parts.items():
        shards = [of_ranks[place] for place in sorted(of_ranks)]
        if ".linear_fc1." in key and model["activation"] == "swiglu":  # each shard is the halves of two matrices
            shards = [shard.chunk(2)[half] for half in (0, 1) for shard in shards]
        found[key] = torch.cat(shards, max(cuts[key], 0))
        assert not found[key].isnan().any(), key
    return found


def sha256(tensor: torch.Tensor) -> str:
    """Of its numbers."""
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _train(rank: int, world: int, folder: str, name: str, tp: int, pp: int, how: str, half: bool) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    built = torch_dist._megatrons(name, tp, pp)[1]
    model = {**torch_dist.MODELS[name], "vocab_size": 64}
    named = gpt._fill(built, model, tp)
    sharded = how != "plain"
    ddp, optimizer, schedule = _optimizer(built, sharded, half)
    logical: Callable[[], dict[str, torch.Tensor]] = lambda: _together(_gathered(_held(optimizer, named)), model, tp)  # noqa: E731
    trace = [_step(ddp, optimizer, schedule, number, tp) for number in range(BEFORE)]

    metadata = {"distrib_optim_sharding_type": how, "chained_optim_avoid_prefix": True} if sharded else {}
    shards = built.sharded_state_dict(metadata={})  # type: ignore[operator]
    args = torch_dist.arguments(model)
    args.bf16, args.consumed_train_samples, args.consumed_valid_samples = half, BEFORE * BATCH, 0
    args.lr_warmup_init, args.iteration = 0.0, BEFORE
    state = {"args": args, "checkpoint_version": 3.0, "iteration": BEFORE, "model": shards,
             "opt_param_scheduler": schedule.state_dict()}  # fmt: skip
    state["optimizer"] = optimizer.sharded_state_dict(shards, metadata=metadata)
    place = Path(folder) / f"iter_{BEFORE:07d}"
    if rank == 0:
        place.mkdir()
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text(f"{BEFORE}")
    dist.barrier()
    dist_checkpointing.save(state, str(place))
    saved = {key: sha256(tensor) for key, tensor in logical().items()}
    trace += [_step(ddp, optimizer, schedule, BEFORE + number, tp) for number in range(AFTER)]
    last = {key.split()[1]: tensor for key, tensor in logical().items() if key.startswith("fp32_param ")}
    return {"state": saved, "trace": trace, "flags": FLAGS} | {
        "last": {key: [value.double().norm().item(), zero.probe(key, value)] for key, value in last.items()}
    }


def _gathered(mine: Pieces) -> list[Pieces]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def write(folder: str, name: str, tp: int, pp: int, dp: int, how: str, *half: str) -> None:
    """Train, save, go on; the folder is there and empty.

    Args:
        how: "plain", an optimizer that is not distributed; else how the distributed one's state is stored.
        half: "bf16", or nothing.
    """
    found = ranks.run(_train, tp * pp * dp, folder, name, tp, pp, how, bool(half), tp=tp, pp=pp)
    (Path(folder) / "trained.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    folder, name, tp, pp, dp, *rest = sys.argv[1:]
    write(folder, name, int(tp), int(pp), int(dp), *rest)
