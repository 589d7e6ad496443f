"""Our shards are those of Megatron's distributed optimizer, and twenty steps with them print its trace.

The numbers are those of megatron-core 0.16.1 on the CPU (`tests/oracle/zero.py`). Its own layouts stray from each other
by up to 1.4e-5 over the twenty steps (`layouts` in the frozen file).
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig, TransformerConfig
from minimegatron.layers.logical import load_logical
from minimegatron.layers.param import logical_parameters
from minimegatron.models.decoder import GPTModel
from minimegatron.optim.build import build_optimizer
from minimegatron.parallel.data.buckets import bucket_layout
from minimegatron.parallel.data.ddp import data_parallel
from minimegatron.parallel.data.finalize import finalize_model_grads
from tests import golden
from tests.golden import megatron_names
from tests.oracle.zero import probe
from tests.thorough import mostly_thorough

FROZEN = golden.load("zero")
STRATEGIES: dict[str, dict[str, Any]] = {
    "optim": {"use_distributed_optimizer": True},
    "optim_grads": {"data_parallel_sharding_strategy": "optim_grads"},
    "optim_grads_params": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "fsdp2": {"use_torch_fsdp2": True},
}


@pytest.mark.parametrize("entry", FROZEN["ranges"], ids=lambda e: f"{e['model']}-{e['ranks']}-{e['bucket_size']}")
def test_every_rank_owns_what_megatrons_does(entry: dict[str, Any]) -> None:
    groups = [index == entry["shared"] for index in range(len(entry["numels"]))]
    layout = bucket_layout(entry["numels"], entry["bucket_size"], entry["ranks"], groups)
    assert [place.start for place in layout.params] == entry["starts"]
    assert [[b.span.start, b.span.stop, b.unpadded] for b in layout.buckets] == entry["buckets"]
    for rank, pieces in enumerate(entry["pieces"]):
        ours = [[p.param, p.bucket, p.of_param.start, p.of_param.stop] for p in layout.pieces(rank)]
        assert sorted(ours) == sorted(pieces), f"rank {rank}"


def train(rank: int, world: int, layout: dict[str, Any]) -> dict[str, Any]:
    """The trace, and norm and probe of every parameter after the last step."""
    mesh = Mesh.build(ParallelConfig.from_dict(layout))
    model = GPTModel(TransformerConfig.from_dict(FROZEN["model"]), mesh)
    load_logical(model, megatron_names.seeded_state_dict(FROZEN["model"]))
    ddp = data_parallel(model, mesh)
    config = OptimizerConfig.from_dict(FROZEN["optimizer"])
    optimizer = build_optimizer(config, ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    mine = megatron_names.seeded_batches(FROZEN["data"])[mesh.dp.rank :: mesh.dp.size]
    trace = []
    for _ in FROZEN["trace"]:
        ddp.zero_grad_buffer()
        total = torch.zeros((), dtype=torch.float64)
        for i, batch in enumerate(mine):
            with contextlib.nullcontext() if i == len(mine) - 1 else ddp.no_sync():
                losses = ddp(batch[:, :-1], labels=batch[:, 1:])
                with ddp.backward_pass():
                    losses.sum().backward()
                total += losses.detach().double().sum()
        count = finalize_model_grads(ddp, mesh, torch.tensor(float(mine[..., 1:].numel())))
        trace.append([(all_reduce(total, mesh.dp_cp) / count).item(), optimizer.step().grad_norm])
    with ddp.whole_weights():
        held = {name: param.detach() for name, param in logical_parameters(ddp)}
        return {"trace": trace, "last": {n: [v.double().norm().item(), probe(n, v)] for n, v in held.items()}}


@pytest.mark.parametrize("strategy", mostly_thorough(STRATEGIES, [1]))
def test_twenty_steps_are_megatrons(ranks: Any, strategy: str) -> None:
    first, second = ranks(2).run(train, STRATEGIES[strategy], timeout=120)
    assert first == second, "both ranks must hold the same bits"
    want = torch.tensor(FROZEN["trace"])
    torch.testing.assert_close(torch.tensor(first["trace"]), want, rtol=0, atol=5e-5)
    assert first["last"].keys() == FROZEN["last"].keys()
    for name, numbers in FROZEN["last"].items():
        assert first["last"][name] == pytest.approx(numbers, rel=1e-4, abs=1e-4), name


def test_the_frozen_trace_agrees_across_layouts_and_moves() -> None:
    assert len(FROZEN["trace"]) == 20 and len(FROZEN["layouts"]) == 3
    assert all(strays <= 2e-5 for strays in FROZEN["layouts"].values())
    assert FROZEN["trace"][-1][0] < 0.6 * FROZEN["trace"][0][0]
