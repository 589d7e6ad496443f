"""Tokens may count for less than 1: gradient and loss are the weighted means, however small the weights are."""

from __future__ import annotations

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.training.reports import reduce_reports
from tests.twin import Case, accumulate, microbatch, parallel_model


def test_a_common_factor_of_all_weights_changes_nothing(monkeypatch):
    case, mesh, found = Case(accumulation=2), Mesh.serial(), []
    for factor in (1.0, 1e-4):

        def weighted(case: Case, rank: int, index: int, factor: float = factor) -> dict[str, torch.Tensor]:
            batch = microbatch(case, rank, index)
            return {**batch, "loss_mask": factor * batch["loss_mask"]}

        monkeypatch.setattr("tests.twin.microbatch", weighted)
        ddp = parallel_model(case, mesh)
        found.append((accumulate(ddp, case, mesh), ddp.grad_buffers[0].data.clone()))
    assert abs(found[1][0] / found[0][0] - 1) < 1e-6
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-6)


def test_the_mean_of_small_weights_and_of_none_at_all():
    pairs = {"small": torch.tensor([0.006, 0.002]), "none": torch.zeros(2)}
    totals = reduce_reports(pairs, DataParallel(torch.nn.Identity(), Mesh.serial()))
    assert abs(totals.losses["small"] - 3.0) < 1e-6 and totals.losses["none"] == 0.0 and not totals.stop
