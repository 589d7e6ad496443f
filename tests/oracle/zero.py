"""Ask Megatron's distributed optimizer which elements each rank owns, and train with it for twenty steps.

`ranges`: parameters of two tiny models are laid out in buckets of several sizes for several numbers of ranks. No rank
is needed for it, only a group that says how large it is. Of each layout: where parameters begin, where buckets begin
and end and how much of them is not padding, and of each rank its pieces, [parameter, bucket, from, to], with from and
to in elements of the flattened parameter. Parameters are numbered in the order of registration. The second model ties
its embedding to the output layer of another pipeline stage: Megatron gives such a weight a bucket of its own.

`trace[i]` = [mean loss before step i, norm of the gradient before clipping] of the Llama of `tests/oracle/gpt.py` on
two ranks with the distributed optimizer; `last` = of each parameter after the last step its norm, and its dot product
with the numbers that its name and ".probe" give. `layouts`: how far other layouts stray from the trace.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist

from tests.golden import megatron_names
from tests.oracle import gpt, ranks

STEPS = 20
MODELS = {"gpt": 2, "gpt2": 2}  # of `gpt.MODELS`: layers
SHARED = "embedding.word_embeddings.weight"  # of gpt2
RANKS, BUCKET_SIZES = (2, 3, 8), (None, 3000, 12000)

# name -> ranks, distributed optimizer, elements of a bucket that travels while the backward pass runs
LAYOUTS: dict[str, tuple[int, bool, int | None]] = {
    "serial": (1, False, None),
    "dp2, distributed optimizer": (2, True, None),
    "dp4, distributed optimizer, overlap": (4, True, 5000),
}
REFERENCE = "dp2, distributed optimizer"


def make() -> dict[str, Any]:
    """Ranges, trace, and how far other layouts stray."""
    ranges = ranks.run(_ranges, 1)
    runs = {layout: ranks.run(_train, *how) for layout, how in LAYOUTS.items()}
    want = runs[REFERENCE]["trace"]
    strays = {
        layout: max(abs(a - b) for x, y in zip(run["trace"], want, strict=True) for a, b in zip(x, y, strict=True))
        for layout, run in runs.items()
    }
    return {"ranges": ranges, "model": gpt.LLAMA, "optimizer": gpt.OPTIMIZER, "data": gpt.DATA} | {
        **runs[REFERENCE],
        "layouts": strays,
    }


def probe(name: str, value: torch.Tensor) -> float:
    """A number that every element of a parameter has a part in."""
    return float((value.double() * megatron_names.seeded_weight(f"{name}.probe", tuple(value.shape)).double()).sum())


def _ranges(_: int, __: int) -> list[dict[str, Any]]:
    return [
        _layout(model, layers, size, bucket_size)
        for model, layers in MODELS.items()
        for size in RANKS
        for bucket_size in BUCKET_SIZES
    ]


def _layout(model: str, layers: int, size: int, bucket_size: int | None) -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    shapes = megatron_names.parameter_shapes({**gpt.MODELS[model], "num_layers": layers})
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes.values()]
    if model == "gpt2":
        params[list(shapes).index(SHARED)].shared_embedding = True  # type: ignore[attr-defined]
    pieces: list[list[list[int]]] = []
    for rank in range(size):
        group: Any = types.SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank)
        buffer = _ParamAndGradBuffer(
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            torch.float32,
            torch.float32,
            params,
            group,
            bucket_size,
            {param: name for param, name in zip(params, shapes, strict=True)},
            1.0,
            list(range(len(params))),
            False,
            types.SimpleNamespace(tp=group, dp_cp=group),
        )
        owned = [
            (param, number, where["param"])
            for number in range(len(buffer.buckets))
            for param, where in DistributedOptimizer._build_model_gbuf_range(buffer, number)["param_map"].items()
        ]
        place = {id(param): index for index, param in enumerate(params)}
        pieces.append([[place[id(param)], number, where.start, where.end] for param, number, where in owned])
    starts = [buffer.param_index_map[param][0] for param in params]
    buckets = [[*buffer.bucket_indices[b.bucket_id], b.numel_unpadded] for b in buffer.buckets]
    numels = [param.numel() for param in params]
    return {"model": model, "ranks": size, "bucket_size": bucket_size, "numels": numels} | {
        "shared": list(shapes).index(SHARED) if model == "gpt2" else None,
        "starts": starts,
        "buckets": buckets,
        "pieces": pieces,
    }


def _train(_: int, world: int, sharded: bool, bucket_size: int | None) -> dict[str, Any]:
    """Twenty steps on `world` replicas."""
    from megatron.core import parallel_state as state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config, model = gpt._build(gpt.LLAMA, 1, 1, False)
    named = gpt._fill(model, gpt.LLAMA, 1)
    overlap = bucket_size is not None
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded,
        grad_reduce_in_fp32=True,
        bucket_size=bucket_size,
        overlap_grad_reduce=overlap,
    )
    ddp = DistributedDataParallel(config, ddp_config, model)
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        config.no_sync_func = ddp.no_sync
    settings = {k: v for k, v in gpt.OPTIMIZER.items() if k != "lr_decay_style"}
    optimizer = get_megatron_optimizer(OptimizerConfig(**settings, use_distributed_optimizer=sharded), [ddp])
    gpt._schedule(optimizer)
    config.grad_scale_func = optimizer.scale_loss

    mine = megatron_names.seeded_batches(gpt.DATA)[state.get_data_parallel_rank() :: world]
    trace = []
    for _step in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=gpt._forward_step,
            data_iterator=iter(mine),
            model=ddp,
            num_microbatches=len(mine),
            seq_length=gpt.DATA["seq_length"],
            micro_batch_size=gpt.DATA["micro_batch_size"],
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        total = torch.tensor(sum(loss["loss"].item() for loss in losses), dtype=torch.float64)
        dist.all_reduce(total)
        trace.append([total.item() / gpt.DATA["microbatches"], float(grad_norm)])
    values = {name: param.detach() for name, param in named.items()}
    return {"trace": trace, "last": {n: [v.double().norm().item(), probe(n, v)] for n, v in values.items()}}
