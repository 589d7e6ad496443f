"""What a step of each stage sends, and what a rank keeps, counted: with instances of a sharded optimizer, too."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from minimegatron import trace
from minimegatron.comm.mesh import Mesh, axis_groups
from minimegatron.config import OptimizerConfig, ParallelConfig
from minimegatron.errors import ConfigError
from minimegatron.memory import Tracker
from minimegatron.models.decoder import build_model
from minimegatron.optim.build import build_optimizer
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.parallel.data.ddp import DistributedDataParallel
from tests.axes import EP, TP
from tests.thorough import SLOW, mostly_thorough
from tests.twin import Case, accumulate, parallel_model

INSTANCES = "num_distributed_optimizer_instances"
ZERO1 = {"use_distributed_optimizer": True}


def test_groups_are_megatrons() -> None:
    """8 ranks, tp 2, two instances; what Megatron-Core 0.16.1 makes of dp-cp and of expert-dp."""
    parallel = ParallelConfig.from_dict({**ZERO1, TP: 2, EP: 2, "expert_tensor_parallel_size": 1, INSTANCES: 2})
    groups = axis_groups(parallel, 8)
    assert {name: groups[name] for name in groups if name.endswith(("_shard", "_instances"))} == {
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


@pytest.mark.parametrize("instances", mostly_thorough([1, 2, 4], [1]))
@pytest.mark.parametrize("sharding", mostly_thorough(["optim", "optim_grads", "optim_grads_params"], [0, 2]))
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


@SLOW
def test_fsdp2_crosses_once_a_step(ranks: Any) -> None:
    case = Case({INSTANCES: 2}, {"vocab_size": 64}, accumulation=3, sharding="fsdp2")
    assert all(counted == shards > 0 for counted, shards in ranks(4).run(crossed, case))


# Every parameter has a multiple of 4 * 128 elements: no padding.
SIZES = {"hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "vocab_size": 128, "num_layers": 4}
STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
BF16 = {**SIZES, "params_dtype": "bf16", "untie_embeddings_and_output_weights": True}


def kept(rank: int, world: int, sharding: str, instances: int) -> tuple[int, dict[str, int], dict[str, int]]:
    """Parameters of the model; bytes of this rank by owner; the same at the peak of a step."""
    case = Case({INSTANCES: instances}, BF16, sharding=sharding, accumulation=2, seq_length=64)
    mesh = Mesh.build(case.parallel)
    model = build_model(case.config, mesh, 0)
    count = sum(p.numel() for p in model.parameters())
    bucket_size = 40_000 if sharding == "optim_grads" else None
    ddp: DataParallel
    if sharding == "fsdp2":
        from minimegatron.parallel.data.torch_fsdp import TorchFSDP2  # its import takes half a second

        ddp = TorchFSDP2(model, mesh)
    else:
        ddp = DistributedDataParallel(model, mesh, sharding=sharding, bucket_size=bucket_size)
    optimizer = build_optimizer(OptimizerConfig(), ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    held = {**ddp.held(), **optimizer.held()}
    with Tracker(held) as tracker:
        accumulate(ddp, case, mesh)
        optimizer.step()
    lasting = {
        owner: sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
        for owner, tensors in held.items()
    }
    return count, lasting, dict(tracker.peak.owners)


LAWS = [(s, world, 1) for world in (2, 4) for s in STAGES] + [(s, 4, n) for n in (2, 4) for s in STAGES[1:]]
ORDINARY = (("optim", 4, 4), ("optim_grads", 2, 1), ("optim_grads_params", 4, 2))


@pytest.mark.parametrize(
    "sharding, world, instances",
    mostly_thorough(LAWS, ORDINARY.__contains__, ORDINARY[1:2].__contains__),
)
def test_bytes_of_a_rank_follow_the_laws(ranks: Any, sharding: str, world: int, instances: int) -> None:
    """bf16 weights, fp32 gradients, main parameters and moments: 18 bytes a parameter, of which shards have 1/d.

    d is the ranks of an instance: D replicas in N instances keep 1/(D/N) each.
    """
    d, shared = world // instances, STAGES.index(sharding)
    for count, lasting, peak in ranks(world).run(kept, sharding, instances):
        want = {
            "parameters": 2 * count // (d if shared >= 3 else 1),
            "gradients": 4 * count // (d if shared >= 2 else 1),
            "main parameters": 4 * count // (d if shared >= 1 else 1),
            "moments": 8 * count // (d if shared >= 1 else 1),
        }
        assert {owner: lasting[owner] for owner in want} == want
        assert lasting.get("communication", 0) == 0, "nothing is gathered between steps"
        assert {owner: peak[owner] for owner in want} == want
        whole = {"optim_grads": 4 * count, "optim_grads_params": 6 * count}.get(sharding, 0)
        assert peak.get("communication", 0) < 0.75 * whole or not whole, "never all of the model at once"


@SLOW
@pytest.mark.parametrize("world, instances", mostly_thorough([(2, 1), (4, 1), (4, 2)], [0]))
def test_bytes_of_a_rank_under_fsdp2(ranks: Any, world: int, instances: int) -> None:
    """fp32 shards are parameters and main parameters in one: 16 bytes a parameter, over the ranks of an instance."""
    for count, lasting, _ in ranks(world).run(kept, "fsdp2", instances):
        share = count // (world // instances)
        want = {"parameters": 4 * share, "gradients": 4 * share, "main parameters": 0, "moments": 8 * share}
        assert {owner: lasting[owner] for owner in want} == want
