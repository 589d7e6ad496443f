"""What a rank keeps, counted on live tensors, follows the laws of ZeRO."""

from __future__ import annotations

from typing import Any

import pytest

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.memory import Tracker
from minimegatron.models.decoder import build_model
from minimegatron.optim.build import build_optimizer
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.data.torch_fsdp import TorchFSDP2
from tests.thorough import mostly_thorough
from tests.twin import Case, accumulate

INSTANCES = "num_distributed_optimizer_instances"
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
WITH_INSTANCES = (("optim_grads", 4, 2), ("optim_grads_params", 4, 2), ("optim", 4, 4))


@pytest.mark.parametrize(
    "sharding, world, instances",
    mostly_thorough(LAWS, lambda case: case[1:] == (4, 1) or case in WITH_INSTANCES),
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


@pytest.mark.parametrize("world, instances", mostly_thorough([(2, 1), (4, 1), (4, 2)], [1, 2]))
def test_bytes_of_a_rank_under_fsdp2(ranks: Any, world: int, instances: int) -> None:
    """fp32 shards are parameters and main parameters in one: 16 bytes a parameter, over the ranks of an instance."""
    for count, lasting, _ in ranks(world).run(kept, "fsdp2", instances):
        share = count // (world // instances)
        want = {"parameters": 4 * share, "gradients": 4 * share, "main parameters": 0, "moments": 8 * share}
        assert {owner: lasting[owner] for owner in want} == want
