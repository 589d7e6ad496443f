"""A sharded optimizer takes the steps of one process, bit for bit those of plain data parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.optim.optimizer import build_optimizer
from tests.twin import Case, accumulate, distance, parallel_model

TP, SP, PP = "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size"
CP, EP, VP = "context_parallel_size", "expert_model_parallel_size", "num_virtual_stages_per_pipeline_rank"
STEPS = 20
ADAM = OptimizerConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.1)


def trained(rank: int, world: int, case: Case, config: OptimizerConfig) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Logical weights after some steps, and the norms of their gradients."""
    mesh = Mesh.build(ParallelConfig.from_dict(case.layout))
    ddp = parallel_model(case, mesh)
    optimizer = build_optimizer(config, ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    norms = []
    for _ in range(STEPS):
        accumulate(ddp, case, mesh)
        norms.append(optimizer.step().grad_norm)
    with ddp.whole_weights():
        return {n: gather_logical(p, layout_of(p), mesh) for n, p in logical_parameters(ddp)}, norms


@pytest.mark.parametrize("sharding", ["optim", "optim_grads", "optim_grads_params", "fsdp2"])
@pytest.mark.parametrize("layout", [{}, {TP: 2, SP: True}, {PP: 2}], ids=str)
def test_steps_are_those_of_plain_data_parallelism(ranks: Any, layout: dict[str, Any], sharding: str) -> None:
    def case(sharding: str) -> Case:
        return Case(layout, {"num_layers": 4}, accumulation=2, sharding=sharding, double=True)

    pool = ranks(2 * layout.get(TP, 1) * layout.get(PP, 1))
    for (want, want_norms), (got, norms) in zip(
        pool.run(trained, case("no_shard"), ADAM), pool.run(trained, case(sharding), ADAM), strict=True
    ):
        assert max(distance(got[name], want[name]) for name in want) <= 1e-12
        assert norms == pytest.approx(want_norms, rel=1e-12)
