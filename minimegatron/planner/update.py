"""The optimizer's part of a step: bytes it reads and writes, Muon's products, and messages.

The optimizer is built on torch's `meta` device for what this rank updates (`optim.build`), and asked. n elements:

| what                | cost                                                                                           |
|---------------------|------------------------------------------------------------------------------------------------|
| elementwise update  | states read and written, gradients read twice (the norm), weights written: AdamW's 34 n bytes  |
| quantized state     | read, written as fp32, updated there, read again and written back: 16 n bytes more             |
| Muon, sides k <= l  | an iteration has 4 k^2 l + 2 k^3 FLOPs in bf16                                                 |
| offloaded to host   | gradients down, update in the host's memory, weights up: the sum, the slowest if they overlap  |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from minimegatron.config import OptimizerConfig
from minimegatron.footprint.events import Message, Operation, require_known
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.muon import LayerWise, Orthogonalizer
from minimegatron.optim.optimizer import MixedPrecisionOptimizer
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.planner.cluster import Cluster

FP32 = 4  # bytes of a gradient, and of a number while it is moved


def optimizer_of(ddp: DistributedDataParallel, config: OptimizerConfig) -> MixedPrecisionOptimizer:
    """The optimizer of a rank; for a model on the `meta` device it has no memory."""
    return build_optimizer(config, ddp, ddp.mesh, ddp.shards())


def update_time(ddp: DistributedDataParallel, config: OptimizerConfig, cluster: Cluster) -> float:
    """Seconds from the gradients' norm to the new weights, without messages."""
    optimizer = optimizer_of(ddp, config)
    held, params = optimizer.held(), optimizer.params
    count, element = sum(p.main.numel() for p in params), max((p.model.element_size() for p in params), default=0)
    above = sum(t.numel() for t in held.get("main parameters (host)", ()))
    seconds = cluster.moved(_touched(held, "", count - above, element))
    seconds += sum(cluster.operation(product) for product in muon_products(ddp, config))
    if not above:
        return seconds
    require_known(cluster.bus > 0 and cluster.host > 0, f"the memory of the host of {cluster.gpu}")
    there = _touched(held, " (host)", above, element) / cluster.host
    parts = above * FP32 / cluster.bus, there, above * element / cluster.bus
    return seconds + (max(parts) if config.overlap_cpu_optimizer_d2h_h2d else sum(parts))


def _touched(held: Mapping[str, list[torch.Tensor]], where: str, count: int, element: int) -> float:
    """Bytes that an update of these states, and of `count` gradients and weights, reads and writes."""
    mains, moments = (held.get(f"{owner}{where}", []) for owner in ("main parameters", "moments"))
    states = 2.0 * sum(t.nbytes for t in (*mains, *moments))
    states += sum(4 * FP32 * t.numel() for t in (*mains, *moments) if t.dtype != torch.float32)
    return states + count * (2 * FP32 + element * (1 if mains else 2))


def _muons(ddp: DistributedDataParallel, config: OptimizerConfig) -> list[Orthogonalizer]:
    """One `Orthogonalizer` for each matrix that Muon updates."""
    params = optimizer_of(ddp, config).params if config.has_matrices else []
    return [Orthogonalizer(p.name, layout_of(p.model), ddp.mesh, config) for p in params if p.rates.matrix]


def muon_products(ddp: DistributedDataParallel, config: OptimizerConfig) -> list[Operation]:
    """Products of all Muon iterations: both factors are read and the result is written, in bf16."""
    updates = _muons(ddp, config)
    require_known(not updates or config.muon_fp32_matmul_prec == "medium", "Muon's products in fp32")
    sizes = [size for update in updates for size in update.products()]
    return [Operation("mm", 2.0 * m * n * k * count, 2 * count * (m * k + k * n + m * n)) for m, n, k, count in sizes]


def update_messages(ddp: DistributedDataParallel, config: OptimizerConfig) -> Iterator[Message]:
    """Messages of the optimizer: Muon's momenta or Gram matrices, and weights from their owners."""
    for update in _muons(ddp, config):
        yield from (Message(name, axis.name, nbytes) for name, axis, nbytes in update.messages())
    if config.optimizer == "dist_muon":
        owners = LayerWise([(n, p) for n, p in logical_parameters(ddp.module) if p.requires_grad], ddp.mesh)
        for axis, _, some in owners.messages():
            nbytes = sum(p.numel() * p.element_size() for p in some)
            yield from [Message("broadcast", axis.name, nbytes)] * (axis.size > 1)
