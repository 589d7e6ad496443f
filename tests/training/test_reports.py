"""A step reads its device twice, its batches do not wait, counts are exact, stages without a loss know its names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimegatron.comm import agree
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.schedule import OptimizerParamScheduler, Schedule
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.training import reports as module
from minimegatron.training.datasets import to_device
from minimegatron.training.reports import reduce_reports
from minimegatron.training.step import forward_step, loss_func, train_step
from tests.twin import Case, microbatch, parallel_model
from tests.waits import waits

MOE = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "add_bias_linear": False}


def waits_of_a_step(case: Case, **optimizer: Any) -> list[str]:
    mesh, config = Mesh.serial(), OptimizerConfig(**optimizer)
    ddp = parallel_model(case, mesh)
    opt = build_optimizer(config, ddp, mesh)
    scheduler = OptimizerParamScheduler(
        opt.param_groups, Schedule.from_config(config, global_batch_size=1, train_iters=9)
    )
    for _ in range(2):  # the first one makes tables
        data = iter([microbatch(case, 0, i) for i in range(case.accumulation)])
        with waits() as found:
            train_step(forward_step, data, ddp, opt, scheduler, num_microbatches=case.accumulation)
    return found


@pytest.mark.parametrize("model", [{}, {"params_dtype": "bf16"}, {"params_dtype": "fp16"}], ids=str)
def test_a_step_reads_its_losses_and_its_norm(model):
    assert waits_of_a_step(Case(model=model, accumulation=2)) == ["tolist", "tolist"]
    assert waits_of_a_step(Case(model=model), clip_grad=0.0, log_num_zeros_in_grad=True) == ["tolist", "tolist"]


def test_a_count_beyond_what_fp32_counts():
    mask = torch.ones(1, 2**24 + 1)
    loss, count, reports = loss_func(mask, mask)
    assert count == 2**24 + 1 and reports["lm loss"][1] == 2**24 + 1


def test_batches_go_to_a_gpu_from_pinned_memory_without_waiting(monkeypatch):
    done: list[tuple[str, int, Any]] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: done.append(("pin", t.data_ptr(), None)) or t.clone())
    monkeypatch.setattr(torch.Tensor, "to", lambda t, d, **how: done.append(("copy", t.data_ptr(), (d.type, how))) or t)
    batch = {"tokens": torch.arange(6), "loss_mask": torch.ones(6)}
    moved = to_device(batch, torch.device("cuda"))
    assert moved.keys() == batch.keys() and all(torch.equal(moved[n], batch[n]) for n in batch)
    assert [what for what, *_ in done] == ["pin", "copy"] * 2
    for (_, pageable, _), (_, copied, how) in zip(done[::2], done[1::2], strict=True):
        assert copied != pageable and how == ("cuda", {"non_blocking": True})


def in_a_pipeline(rank: int, world: int) -> list[Any]:
    """Four calls: of the last stage's names, of the same, of others, of these."""
    mesh = Mesh.build(ParallelConfig(pipeline_model_parallel_size=2))
    model = DataParallel(torch.nn.Identity(), mesh)
    asked: list[Any] = []
    real, found = agree.gather_objects, []
    module.gather_objects = lambda item, axis: asked.append(item) or real(item, axis)
    try:
        for call in ({"a": 2.0}, {"a": 4.0}, {"b": 6.0, "a": 8.0}, {"b": 1.0, "a": 3.0}):
            mine = {n: torch.tensor([v, 2.0], dtype=torch.float64) for n, v in call.items()} if mesh.pp.rank else {}
            totals = reduce_reports(
                mine, model, hook_tables=[torch.tensor([7.0])], asks_to_stop=call == {"a": 4.0} and rank == 0
            )
            found.append((totals.losses, totals.stop, totals.hook_tables[0][0], len(asked)))
    finally:
        module.gather_objects = real
    return found


def test_the_last_stage_says_the_names_once_and_again_when_they_change(ranks):
    for found in ranks(2).run(in_a_pipeline):
        assert [means for means, *_ in found] == [{"a": 1.0}, {"a": 2.0}, {"b": 3.0, "a": 4.0}, {"b": 0.5, "a": 1.5}]
        assert [(stop, beside) for _, stop, beside, _ in found] == [(False, 7), (True, 7), (False, 7), (False, 7)]
        assert [asked for *_, asked in found] == [1, 1, 2, 2]
