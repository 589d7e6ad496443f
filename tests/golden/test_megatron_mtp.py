"""The gradient of a model that predicts two tokens after the next is Megatron's (`tests/oracle/mtp.py`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.sequence import cut_batch
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.layers.logical import gather_logical, load_logical
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.models.decoder import GPTModel
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.data.finalize import finalize_model_grads
from tests import golden
from tests.oracle.moe import seeded

FROZEN = golden.load("mtp")


def gradients(rank: int, world: int, layout: dict[str, Any], positions: str) -> dict[str, float]:
    mesh = Mesh.build(ParallelConfig(**layout))
    config = TransformerConfig(
        **FROZEN["model"],
        vocab_size=64,
        make_vocab_size_divisible_by=16,
        add_bias_linear=False,
        position_embedding_type=positions,
        max_position_embeddings=16,
        untie_embeddings_and_output_weights=True,
    )
    model = GPTModel(config, mesh)
    weights = {n: seeded(n, layout_of(p).shape) * 0.05 for n, p in logical_parameters(model)}
    load_logical(model, {n: w + 1 if "norm" in n else w for n, w in weights.items()})
    ddp = DistributedDataParallel(model, mesh)
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(7))
    batch = cut_batch({"tokens": ids[:, :-1], "labels": ids[:, 1:]}, mesh)
    losses = ddp(batch["tokens"], labels=batch["labels"])
    losses.sum().backward()
    finalize_model_grads(ddp, mesh, torch.zeros(()))  # of the sum: no token counts, nothing is divided
    return {n: gather_logical(p.main_grad, layout_of(p), mesh).double().norm().item() for n, p in ddp.params.items()}


@pytest.mark.parametrize("positions", FROZEN["positions"])
@pytest.mark.parametrize(
    "world, layout",
    [
        (1, {}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (2, {"context_parallel_size": 2}),
    ],
    ids=str,
)
def test_every_gradient(ranks, world, layout, positions):
    norms = FROZEN["positions"][positions]["grad_norms"]
    for found in ranks(world).run(gradients, layout, positions):
        assert found.keys() == norms.keys(), "Megatron's names"
        for name, norm in norms.items():
            assert found[name] == pytest.approx(norm, rel=2e-5, abs=2e-6), name
