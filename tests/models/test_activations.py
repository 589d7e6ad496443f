"""What a forward pass keeps, predicted by arithmetic, beside what is alive in a step of one process."""

from __future__ import annotations

from typing import Any

import pytest

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.memory import ACTIVATIONS, WORKSPACE, Tracker
from minimegatron.models import activations as a
from minimegatron.models.decoder import build_model
from minimegatron.optim.optimizer import build_optimizer
from minimegatron.parallel.ddp import DistributedDataParallel
from tests.twin import Case, accumulate

SIZES: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 256, "vocab_size": 128}
GPT2 = {"family": "gpt2", "num_query_groups": 4}
FULL = {"recompute_granularity": "full", "num_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama in bf16": {"params_dtype": "bf16"},
    "gpt2": GPT2,
    "gpt2 with dropout": {**GPT2, "hidden_dropout": 0.1, "attention_dropout": 0.0},
    "the formula of attention": {"attention_backend": "reference"},
    "the formula in bf16": {"attention_backend": "reference", "params_dtype": "bf16"},
    "blockwise attention": {"attention_backend": "local"},
    "one group of keys": {"num_query_groups": 1},
    "squared relu": {"activation": "squared_relu"},
    "a large vocabulary": {"vocab_size": 2048},
    "a large vocabulary in bf16": {"vocab_size": 2048, "params_dtype": "bf16"},
    "every layer again": FULL,
    "two layers again": {**FULL, "recompute_num_layers": 2},
    "the first layers again": {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
    "attention again": {"recompute_granularity": "selective", "attention_backend": "reference"},
    "mlp and norms again": {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")},
}


def tape_of(case: Case, separate: bool) -> a.Tape:
    """The whole model on one rank."""
    config = case.config
    z = a.Sizes(case.seq_length, case.micro_batch_size, 1, False, config.dtype.itemsize, separate)
    layers = [step for _, tape in a.layers(config, z, range(config.num_layers)) for step in tape]
    return a.Tape([a.batch(config, z), *a.embedding(config, z), *layers, *a.output(config, z)])


@pytest.mark.parametrize("name", list(MODELS))
def test_the_fullest_moment_of_a_step_is_predicted(name: str) -> None:
    """Within 1 % of activations and workspace, without the states, which would make any error small."""
    case = Case({}, {**SIZES, **MODELS[name]}, seq_length=64)
    mesh = Mesh.serial()
    ddp = DistributedDataParallel(build_model(case.config, mesh, 0), mesh)
    optimizer = build_optimizer(OptimizerConfig(), ddp, mesh, ddp.shards())
    accumulate(ddp, case, mesh)
    optimizer.step()
    with Tracker({**ddp.held(), **optimizer.held()}) as tracker:
        accumulate(ddp, case, mesh)
        optimizer.step()
    owners = tracker.peak.owners
    tape = tape_of(case, separate=case.config.params_dtype != "fp32")
    highest = max(tape.highest(backward=False), tape.highest(backward=True), key=lambda moment: moment.total)
    assert highest.total == pytest.approx(owners.get(ACTIVATIONS, 0) + owners.get(WORKSPACE, 0), rel=0.01)


def test_recompute_keeps_inputs_alone() -> None:
    case = Case({}, {**SIZES, "num_layers": 4}, seq_length=64)
    again = Case({}, {**SIZES, **FULL}, seq_length=64)
    stream = 4 * 64 * 2 * 64
    kept = [step.keeps for step in tape_of(again, False) if "recomputed" in step.name]
    assert kept == [stream] * 4
    assert tape_of(again, False).kept < tape_of(case, False).kept / 3


def test_the_moment_has_a_name() -> None:
    case = Case({}, {**SIZES, "vocab_size": 2048}, seq_length=64)
    assert tape_of(case, False).highest(backward=False).where == "forward loss"
    gated = Case({}, SIZES, seq_length=64)
    assert tape_of(gated, False).highest(backward=True).where == "backward activation"


def test_what_is_not_predicted_is_named() -> None:
    assert a.unknown(Case().config) == []
    moe = Case({}, {"num_experts": 4, "moe_router_topk": 2}).config
    assert [what.split()[0] for what in a.unknown(moe, context_parallel=2)] == ["experts", "context"]
