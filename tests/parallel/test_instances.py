"""Several instances of a sharded optimizer: whose groups they are, and what travels inside of one and between them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from minimegatron import trace
from minimegatron.comm.mesh import Mesh, instance_groups
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError
from minimegatron.parallel.data.ddp import DistributedDataParallel
from tests.twin import Case, accumulate, parallel_model

INSTANCES, TP, EP = "num_distributed_optimizer_instances", "tensor_model_parallel_size", "expert_model_parallel_size"
ZERO1 = {"use_distributed_optimizer": True}


def test_groups_are_megatrons() -> None:
    """8 ranks, tp 2, two instances; what Megatron-Core 0.16.1 makes of dp-cp and of expert-dp."""
    parallel = ParallelConfig.from_dict({**ZERO1, TP: 2, EP: 2, "expert_tensor_parallel_size": 1, INSTANCES: 2})
    assert instance_groups(parallel, 8) == {
        "dp_shard": [[0, 2], [4, 6], [1, 3], [5, 7]],
        "dp_instances": [[0, 4], [2, 6], [1, 5], [3, 7]],
        "edp_shard": [[0, 2], [4, 6], [1, 3], [5, 7]],
        "edp_instances": [[0, 4], [2, 6], [1, 5], [3, 7]],
    }


@pytest.mark.parametrize(
    "fields, world, words",
    [
        ({INSTANCES: 2}, 4, "nothing is shared out"),
        ({**ZERO1, INSTANCES: 3}, 4, r"dp\*cp is 4, .* does not divide it"),
        ({**ZERO1, INSTANCES: 4, EP: 2}, 4, "expert-dp is 2, .* does not divide it"),
    ],
    ids=str,
)
def test_instances_that_cannot_be_are_refused(fields: dict[str, Any], world: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelConfig.from_dict(fields).data_parallel_size(world)


def travelled(rank: int, world: int, case: Case) -> tuple[dict[tuple[str, str], int], int, int]:
    """{(collective, axis): elements} of a step; elements of the buffers, of weights outside of layers."""
    mesh = Mesh.build(case.parallel)
    ddp = parallel_model(case, mesh)
    assert isinstance(ddp, DistributedDataParallel)
    with trace.record(rank) as log:
        accumulate(ddp, case, mesh)
        ddp.start_param_gather()
    found: dict[tuple[str, str], int] = {}
    for event in log.select(kind="comm"):
        found[event.name, event.axis] = found.get((event.name, event.axis), 0) + event.nbytes // 4
    outside = sum(b.span.size for b in ddp.grad_buffers[0].buckets if not any("layers" in name for name in b.members))
    return found, ddp.grad_buffers[0].layout.total, outside


@pytest.mark.parametrize("instances", [1, 2, 4])
@pytest.mark.parametrize("sharding", ["optim", "optim_grads", "optim_grads_params"])
def test_what_travels_inside_of_an_instance_and_between_them(ranks: Any, sharding: str, instances: int) -> None:
    """Inside whole buckets, between instances a shard: the same 2 (D-1)/D in all, most of it among neighbours."""
    m, world = 3, 4
    case = Case({INSTANCES: instances}, {"num_layers": 3}, accumulation=m, sharding=sharding)
    shards = world // instances
    inside = "dp_shard" if instances > 1 else "dp_cp"
    for found, total, outside in ranks(world).run(travelled, case):
        passes = 1 if sharding == "optim" else m
        assert found.get(("reduce_scatter", inside), 0) == (passes * total if shards > 1 else 0)
        assert found.get(("all_reduce", "dp_instances"), 0) == (total // shards if instances > 1 else 0)
        # Stage 3: every layer comes twice a microbatch; what is in no layer stays from forward to backward.
        gathered = (2 * total - outside) * m if sharding == "optim_grads_params" else total
        assert found.get(("all_gather", inside), 0) == (gathered if shards > 1 else 0)
        assert ("all_gather", "dp_instances") not in found


def crossed(rank: int, world: int, case: Case) -> tuple[int, int]:
    """Elements that FSDP2 sums over instances in a step; and those of this rank's shards."""
    mesh = Mesh.build(case.parallel)
    ddp = parallel_model(case, mesh)
    seen, real = [], dist.all_reduce

    def counting(x: Any, *args: Any, **how: Any) -> Any:
        if how.get("group") is mesh.dp_instances.group:
            seen.append(x.numel())
        return real(x, *args, **how)

    with mock.patch.object(dist, "all_reduce", counting):
        accumulate(ddp, case, mesh)
    return sum(seen), sum(shard.grad.numel() for shard in ddp.shards().values())


def test_fsdp2_crosses_once_a_step(ranks: Any) -> None:
    case = Case({INSTANCES: 2}, {"vocab_size": 64}, accumulation=3, sharding="fsdp2")
    assert all(counted == shards > 0 for counted, shards in ranks(4).run(crossed, case))
