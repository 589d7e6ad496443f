"""What was true a moment ago: a sum of the step before, weights from before the update, a gradient that is still to
come. Each is a buffer or a mark that outlives its use, and nothing is wrong the first time."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.linear import ColumnParallelLinear
from minimegatron.layers.logical import initialize
from minimegatron.layers.param import Init
from minimegatron.layers.wgrad import WeightGradStore, compute_wgrads, deferring_wgrad
from minimegatron.optim.build import build_optimizer
from minimegatron.parallel.data import param_buffer
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.data.finalize import finalize_model_grads
from tests.axes import EP
from tests.parallel.data.test_gathers import ADAM, LastMoment
from tests.parallel.data.test_traffic import INSTANCES
from tests.thorough import mostly_slow, mostly_thorough
from tests.twin import Case, accumulate, compare_all, compare_with_serial, microbatch, parallel_model, problems

STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "fsdp2")


# ------------------------------------------------------------------------------------------------ sums


class Halves(nn.Module):
    """Two parts, of which a step may run one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *parts: str) -> torch.Tensor:
        for part in parts:
            x = getattr(self, part)(x)
        return x


def sums_of_parts(rank: int, world: int, sharding: str, overlap: bool) -> list[dict[str, torch.Tensor]]:
    """Gradients of steps that run both parts, the first, none, and the second."""
    mesh = Mesh.build(ParallelConfig())
    ddp = DistributedDataParallel(Halves(), mesh, 1, overlap, sharding=sharding)
    x, found = torch.full((2, 8), float(rank + 1)), []
    for parts in ("ab", "a", "", "b"):
        ddp.zero_grad_buffer()
        for part in parts:  # a pass for each, as chunks of a pipeline have
            with ddp.backward_pass(getattr(ddp.module, part)):
                ddp(x, part).square().sum().backward()
        ddp.finish_grad_sync()
        found.append({name: grad.clone() for name, grad in ddp.whole_gradients().items()})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sharding", STAGES[:-1])
def test_a_part_without_a_pass_has_a_sum_of_zeros(ranks: Any, sharding: str) -> None:
    for overlap in (False, True):
        for both, first, neither, second in ranks(2).run(sums_of_parts, sharding, overlap):
            assert all(grad.any() for grad in both.values())
            for name, grad in both.items():
                for now, ran in ((first, name[0] == "a"), (neither, False), (second, name[0] == "b")):
                    assert torch.equal(now[name], grad if ran else torch.zeros_like(grad)), name


@pytest.mark.parametrize("sharding", mostly_slow(STAGES, [0, 3]))
def test_a_number_of_tokens_that_16_bits_do_not_have(ranks: Any, sharding: str) -> None:
    """bf16 skips odd numbers above 256: batches of the other tests are smaller."""
    one = Case({}, {"num_layers": 1}, sharding=sharding, seq_length=64, micro_batch_size=7, double=True, seed=3)
    count = sum(int(microbatch(one, rank, 0)["loss_mask"].sum()) for rank in range(2))
    assert count > 256 and float(torch.tensor(float(count)).bfloat16()) != count
    for report in ranks(2).run(compare_with_serial, one):
        assert problems(report, 1e-10) == []


def counted_over_ranks(rank: int, world: int, layout: dict[str, Any]) -> tuple[float, float]:
    """The global number of 2^24 + 1 tokens a rank, one number more than fp32 has; and what a gradient of it becomes."""
    mesh = Mesh.build(ParallelConfig.from_dict(layout))
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False, dtype=torch.float64), mesh, grad_dtype=torch.float64)
    ddp.zero_grad_buffer()
    tokens = torch.tensor(2.0**24 + 1, dtype=torch.float64)
    (ddp(torch.ones(1, 1, dtype=torch.float64)) * tokens).sum().backward()
    total = finalize_model_grads(ddp, mesh, tokens)
    return float(total), float(next(iter(ddp.whole_gradients().values())))


def test_more_tokens_than_fp32_counts(ranks: Any) -> None:
    assert counted_over_ranks(0, 1, {}) == (2.0**24 + 1, 1.0)
    assert ranks(2).run(counted_over_ranks, {}) == [(2.0**25 + 2, 1.0)] * 2
    assert ranks(2).run(counted_over_ranks, {"context_parallel_size": 2}) == [(2.0**25 + 2, 1.0)] * 2


# ------------------------------------------------------------------------------------------------ weights


def after_the_update(rank: int, world: int, case: Case) -> list[torch.Tensor]:
    """What is read of the new weights: by who asks for all, by a pass, and by a pass after one without its backward."""
    mesh = Mesh.build(case.parallel)
    slow = mock.patch.object(param_buffer, "all_gather_start", LastMoment()) if case.gathers_late else None
    with slow or contextlib.nullcontext():
        ddp = parallel_model(case, mesh)
        optimizer = build_optimizer(ADAM, ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
        tokens, found = microbatch(case, 0, 0)["tokens"], []
        for _ in range(3):
            accumulate(ddp, case, mesh)
            ddp(tokens)  # somebody looks at the outputs and asks for no gradient
            optimizer.step()
            with torch.no_grad():
                found.append(ddp(tokens))
            accumulate(ddp, case, mesh)
            optimizer.step()
            with ddp.whole_weights():
                found.append(torch.cat([p.detach().flatten() for p in ddp.params.values()]))
    return found


@pytest.fixture(scope="module")
def weights_of_two_replicas(ranks: Any) -> list[list[torch.Tensor]]:
    """What each of two ranks that keep the whole optimizer reads."""
    return list(ranks(2).run(after_the_update, Case({})))


@pytest.mark.parametrize("sharding", mostly_slow(STAGES[1:], [1]))
def test_nobody_reads_weights_from_before_the_update(
    ranks: Any, weights_of_two_replicas: list[list[torch.Tensor]], sharding: str
) -> None:
    late = sharding in ("optim", "optim_grads")
    case = Case({}, sharding=sharding, gathers_late=late, bucket_size=500 if late else None)
    for want, got in zip(weights_of_two_replicas, ranks(2).run(after_the_update, case), strict=True):
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


class Broken(Exception):
    """A layer has failed."""


def gathered_bytes(ddp: DistributedDataParallel) -> int:
    """Of weights of other ranks that are here."""
    return sum(whole.untyped_storage().nbytes() for whole in ddp.held()["communication"])


def gathers_that_were_begun(rank: int, world: int) -> tuple[list[torch.Tensor], dict[str, int]]:
    """New weights after a pass that failed while the next layer's were on their way; and what is here after each."""
    case = Case({}, {"num_layers": 3}, sharding="optim_grads_params", unused=True)  # no layer's gradients are complete
    mesh = Mesh.build(case.parallel)
    ddp = parallel_model(case, mesh)
    assert isinstance(ddp, DistributedDataParallel)
    optimizer = build_optimizer(ADAM, ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    tokens, held = microbatch(case, 0, 0)["tokens"], {}

    def fail(*_: Any) -> None:
        raise Broken

    accumulate(ddp, case, mesh)
    held["a step's passes"] = gathered_bytes(ddp)
    failing = ddp.module.decoder.layers["0"].mlp.register_forward_pre_hook(fail)
    with pytest.raises(Broken):
        ddp(tokens)
    failing.remove()
    assert gathered_bytes(ddp) > 0
    optimizer.step()
    held["an update"] = gathered_bytes(ddp)
    with torch.no_grad():
        found = [ddp(tokens)]
    held["a pass without gradients"] = gathered_bytes(ddp)
    with ddp.whole_weights():
        found += [p.detach().clone() for p in ddp.params.values()]
    held["a look at all weights"] = gathered_bytes(ddp)
    return found, held


def updated_in_one_process(rank: int, world: int) -> list[torch.Tensor]:
    case = Case({}, {"num_layers": 3}, unused=True)
    mesh = Mesh.build(case.parallel)
    ddp = parallel_model(case, mesh)
    accumulate(ddp, case, mesh)
    build_optimizer(ADAM, ddp, mesh, ddp.shards()).step()
    with torch.no_grad():
        return [ddp(microbatch(case, 0, 0)["tokens"]), *(p.detach() for p in ddp.params.values())]


def test_a_gather_from_before_the_update_is_not_used_after_it_and_nothing_stays(ranks: Any) -> None:
    plain = ranks(2).run(updated_in_one_process)
    for want, (got, held) in zip(plain, ranks(2).run(gathers_that_were_begun), strict=True):
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
        assert held == dict.fromkeys(held, 0)


# ------------------------------------------------------------------------------------------------ marks


def test_a_gradient_that_is_put_off_is_not_the_one_that_was_added_before() -> None:
    """Of two steps the first has a schedule without W, whose products are added to the buffer as they are computed."""
    layer = ColumnParallelLinear(6, 6, Mesh.serial().tp, init=Init(std=0.5), bias=False)
    initialize(layer, 0)
    ddp, ready, store = DistributedDataParallel(layer, Mesh.serial()), list[str](), WeightGradStore()
    ddp.complete = ready.append  # type: ignore[method-assign]
    x = torch.ones(4, 2, 6)
    ddp(x).sum().backward()
    assert ready == ["weight"]
    grad = layer.weight.main_grad.clone()
    for step in (2, 3):
        with deferring_wgrad(layer, store):
            ddp(x).sum().backward()
        assert len(ready) == step - 1, "its product is still to be computed"
        compute_wgrads(store.take())
        assert ready == ["weight"] * step and torch.equal(layer.weight.main_grad, step * grad)


# ------------------------------------------------------------------------------------------------ axes that coincide

EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("sharding", mostly_thorough(STAGES[1:], [0, 3], [0]))
def test_experts_have_groups_of_their_own_where_dp_varies_fastest(ranks: Any, sharding: str) -> None:
    """With tp first and dp after ep, copies of experts stand where those of other parameters do; not in other orders.

    Four ranks, two instances: dense shards lie in {0, 1} and {2, 3}, and so do all copies of an expert.
    """
    layout = {EP: 2, "order": "dp-tp-cp-ep-pp"}
    cases = [Case({**layout, **more}, EXPERTS, sharding=sharding, accumulation=2) for more in ({}, {INSTANCES: 2})]
    if sharding in ("optim", "optim_grads"):  # several buckets, of which each has to cross
        cases.append(dataclasses.replace(cases[-1], overlap=True, bucket_size=1000))
    for reports in ranks(4).run(compare_all, cases):
        for report in reports:
            assert problems(report, 1e-5) == []


# ------------------------------------------------------------------------------------------------ sums over tp and embd


def test_sums_that_every_layout_of_tp_and_pp_needs(ranks: Any) -> None:
    """Norms of queries and keys without sequence parallelism; a tied matrix on the two ends of a pipeline."""
    tp, pp = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
    tied = {"family": "gpt2", "num_query_groups": 4, "untie_embeddings_and_output_weights": False}
    cases = [
        Case(tp, {"family": "qwen3"}, double=True),
        Case(tp, {"qk_layernorm": True, "normalization": "LayerNorm", "num_query_groups": 1}, double=True),
        Case(pp, tied, double=True, accumulation=2),
        Case({**pp, "pipeline_schedule": "zb_h1"}, tied, double=True, accumulation=4),
    ]
    for reports in ranks(2).run(compare_all, cases):
        for case, report in zip(cases, reports, strict=True):
            assert problems(report, 1e-10) == [], case
