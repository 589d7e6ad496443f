"""Frozen parameters: the others have the gradients they have anyway, buckets travel, and an evaluation changes nothing.

Half-frozen models are where gradients go missing: a stage without any trainable weight, a bucket that waits for a
gradient that never comes, a hook that an evaluation would fire.
"""

from __future__ import annotations

from typing import Any

import pytest

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.logical import gather_logical, load_logical
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.models.chunks import build_model_chunks
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.training.observers.evaluation import evaluate
from minimegatron.training.step import forward_step
from tests.twin import Case, accumulate, cut_batch, distance, microbatch, serial_gradients, weights

TP, SP, PP = "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size"
MODEL = {"num_layers": 4, "untie_embeddings_and_output_weights": False}
EXPERTS = {**MODEL, "family": "mixtral", "num_experts": 4, "moe_aux_loss_coeff": 0.01}


def trains(name: str, frozen: str) -> bool:
    return "layers.3" in name if frozen == "all but the last layer" else "norm" not in name and "embedding" not in name


def half_frozen(rank: int, world: int, case: Case, frozen: str) -> tuple[float, int]:
    """Largest distance of a gradient from the twin's, and how many parameters train here."""
    mesh = Mesh.build(ParallelConfig.from_dict(case.layout))
    model = build_model_chunks(case.config, mesh, 0)
    load_logical(model, weights(case.config, case.seed), stage=mesh.pp.size > 1)
    for name, param in logical_parameters(model):
        param.requires_grad_(trains(name, frozen))
    ddp = DistributedDataParallel(model, mesh, 500, overlap=True)
    batches = [cut_batch(microbatch(case, mesh.dp.rank, i), mesh) for i in range(case.accumulation)]
    evaluate(forward_step, iter(batches), ddp, case.accumulation)
    accumulate(ddp, case, mesh)
    evaluate(forward_step, iter(batches), ddp, case.accumulation)
    _, want = serial_gradients(case, mesh.dp.size)
    got = {name: gather_logical(p.main_grad, layout_of(p), mesh) for name, p in ddp.params.items()}
    assert all(trains(name, frozen) for name in got)
    return max((distance(got[name], want[name]) for name in got), default=0.0), len(got)


MOST, FEW = "all but the last layer", "norms and the embedding"
ZB_V, PP2, TP2 = (2, {PP: 2, "pipeline_schedule": "zb_v"}, MODEL), (4, {PP: 2}, MODEL), (4, {TP: 2, SP: True}, EXPERTS)


@pytest.mark.parametrize(
    "sizes, frozen",
    [
        pytest.param(ZB_V, MOST, id="zb_v, a stage without weights"),
        pytest.param(TP2, FEW, id="tp2 sp dp2, experts"),
        pytest.param(PP2, MOST, id="pp2 dp2, a stage without weights", marks=pytest.mark.thorough),
        pytest.param(PP2, FEW, id="pp2 dp2", marks=pytest.mark.thorough),
        pytest.param(ZB_V, FEW, id="zb_v", marks=pytest.mark.thorough),
        pytest.param(TP2, MOST, id="tp2 sp dp2, experts in the last layer", marks=pytest.mark.thorough),
    ],
)
def test_what_still_trains_has_the_gradients_of_the_whole(ranks, sizes: Any, frozen: str):
    world, layout, model = sizes
    case = Case(layout, model, accumulation=3)
    results = ranks(world).run(half_frozen, case, frozen)
    assert sum(trained for _, trained in results) > 0
    assert max(off for off, _ in results) <= 3e-5
