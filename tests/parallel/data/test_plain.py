"""The plain wrapper (the one to read) has the gradients of one process, and those of the wrapper that trains."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from tests.axes import EP, PP, TP
from tests.thorough import mostly_thorough
from tests.twin import Case, accumulate, compare_all, parallel_model, problems

TIED = {"family": "gpt2", "num_query_groups": 4, "untie_embeddings_and_output_weights": False}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24}


def plain(layout: dict[str, Any], model: dict[str, Any], accumulation: int, **more: Any) -> Case:
    return Case(layout, model, accumulation, double=True, sharding="plain", bucket_size=1000, **more)


CASES = {
    2: [
        plain({}, TIED, 3, unused=True, empty_rank=1),
        plain({EP: 2}, EXPERTS, 2),
        plain({PP: 2}, TIED, 2),
        plain({PP: 2, "pipeline_schedule": "zb_h1"}, {}, 3),
    ],
    4: [plain({TP: 2, "sequence_parallel": True}, {}, 2)],
}


@pytest.mark.parametrize("world", mostly_thorough(CASES, [0]))
def test_gradients_are_those_of_one_process(ranks: Any, world: int) -> None:
    for reports in ranks(world).run(compare_all, CASES[world]):
        assert [problems(report, 1e-10) for report in reports] == [[]] * len(CASES[world])


def both(rank: int, world: int, case: Case) -> list[Any]:
    """For each wrapper the gradients, the messages of a step, and how many had begun in its last backward pass."""
    runs = []
    for sharding in ("plain", "no_shard"):
        mesh = Mesh.build(case.parallel)
        ddp = parallel_model(dataclasses.replace(case, sharding=sharding), mesh)
        with trace.record(rank) as log:
            accumulate(ddp, case, mesh)
        sums = [e.nbytes for e in log.select("all_reduce", axis="dp_cp") if e.nbytes > 8]
        runs.append(({name: grad.clone() for name, grad in ddp.whole_gradients().items()}, sums))
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_bits_and_messages_are_those_of_the_wrapper_that_trains(ranks: Any, dtype: str) -> None:
    """In bf16 both add a gradient that autograd has rounded; in fp32 the other adds wgrad products, with one rounding
    less for every microbatch after the first, and the rows of an embedding one by one."""
    model = {**TIED, "params_dtype": dtype}
    for accumulation in (1, 3):
        case = Case({}, model, accumulation, overlap=True, bucket_size=1000)
        for (plain, messages), (real, expected) in ranks(4).run(both, case):
            assert messages == expected and len(messages) > 3
            for name, grad in real.items():
                if dtype == "bf16" or (accumulation == 1 and "embedding" not in name):
                    assert torch.equal(plain[name], grad), name
                torch.testing.assert_close(plain[name], grad, rtol=1e-5, atol=1e-7)
