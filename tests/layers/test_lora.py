"""Adapters: the same gradients in every layout, merged and unmerged, and for each part of a packed matrix its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minimegatron.comm.mesh import Mesh
from minimegatron.layers.logical import initialize
from minimegatron.layers.lora import Lora, adapted, merge
from minimegatron.layers.param import logical_parameters
from minimegatron.models.chunks import build_stage
from minimegatron.training.arguments import parse_args
from tests.mock_data import small_trainer as build_trainer
from tests.thorough import mostly_thorough
from tests.twin import Case, losses, microbatch, serial_model

RANK = {"lora_rank": 3, "lora_alpha": 6.0}
EXPERTS = {
    **RANK,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "lora_target_modules": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "experts"),
}
TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
CASES = [
    Case(SP, RANK),
    Case(TP, {**RANK, "family": "gpt2", "num_query_groups": 4}),
    Case({**TP, "pipeline_model_parallel_size": 2}, RANK, accumulation=2),
    Case({**SP, "context_parallel_size": 2}, RANK),
    Case({"tensor_model_parallel_size": 4}, RANK),  # fewer groups than ranks: a rank has rows of q, k and v of a part
    Case({"pipeline_model_parallel_size": 2}, {**RANK, "recompute_granularity": "full"}, accumulation=4),
    Case({**SP, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, EXPERTS),
    Case({}, RANK, sharding="optim_grads_params"),
    Case({**SP, "expert_tensor_parallel_size": 2}, EXPERTS),
    Case({**SP, "expert_tensor_parallel_size": 2}, {**EXPERTS, "activation": "gelu"}, sharding="optim_grads"),
    Case({**SP, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, EXPERTS),
]


@pytest.mark.parametrize("case", mostly_thorough(CASES, (0, 1, 6, 8)))
def test_every_layout_has_the_serial_gradients(assert_same_as_serial: Any, case: Case) -> None:
    size = lambda axis: case.layout.get(f"{axis}_parallel_size", 1)  # noqa: E731
    both = size("tensor_model") * size("pipeline_model") * size("context")
    experts = size("expert_model") * size("expert_tensor")
    assert_same_as_serial(case, dp=2 if both == 1 or experts > both else 1)


@pytest.mark.parametrize("model", [RANK, EXPERTS])
def test_merged_weights_compute_the_same_and_come_back(model: dict[str, Any]) -> None:
    case = Case({}, model, double=True)
    trained = serial_model(case)
    before = {name: param.detach().clone() for name, param in logical_parameters(trained)}
    batch = microbatch(case, 0, 0)
    want = losses(trained, batch)
    merge(trained)
    for _, lora in adapted(trained):
        lora.lora_B.data.zero_()
    assert torch.allclose(losses(trained, batch), want, atol=1e-12)
    for name, param in logical_parameters(trained):
        if "lora" in name:
            param.data.copy_(before[name])
    merge(trained, -1.0)
    assert all(torch.allclose(param, before[name], atol=1e-14) for name, param in logical_parameters(trained))
    assert len(list(adapted(trained))) == 8  # of two layers: qkv, proj, fc1 and fc2, or both stacks of experts


def test_a_packed_matrix_has_an_adapter_for_each_part() -> None:
    """Rows of q, k and v by PEFT's formula, each with its own A and B."""
    case = Case({}, RANK, double=True)
    layer = serial_model(case).decoder.layers["0"].self_attention.linear_qkv
    lora: Lora = layer.lora
    config = case.config
    d, per = config.kv_channels, config.queries_per_group
    x = torch.randn(5, 2, config.hidden_size, dtype=torch.float64)
    added = lora(x).unflatten(-1, (config.num_query_groups, per + 2, d))
    rows = lora.lora_B.unflatten(0, (config.num_query_groups, per + 2, d))
    for part, heads in enumerate((slice(0, per), slice(per, per + 1), slice(per + 1, per + 2))):
        a = lora.lora_A[3 * part : 3 * part + 3]
        want = 2.0 * F.linear(F.linear(x, a), rows[:, heads].flatten(0, 2))
        assert torch.allclose(added[..., heads, :].flatten(2), want)


def test_an_adapter_begins_without_effect_and_alone_learns() -> None:
    case = Case({}, RANK)
    fresh = build_stage(case.config, Mesh.serial(), None)
    plain = build_stage(case.config.replace(lora_rank=None), Mesh.serial(), None)
    for model in (fresh, plain):
        initialize(model, 1, torch.device("cpu"))
    batch = microbatch(case, 0, 0)
    assert torch.equal(losses(fresh, batch), losses(plain, batch))


def test_memory_of_adapters_alone_is_predicted_and_counted(capsys: pytest.CaptureFixture) -> None:
    """Gradients and moments are those of the adapters; what a frozen model keeps for its backward pass is not known."""
    line = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --lora-rank 4 --mock-data "
    line += "--vocab-size 60 --train-iters 1 --log-memory-interval 1"
    trainer = build_trainer(parse_args(line.split()))
    trainer.train()
    trainer.close()
    said = capsys.readouterr().out.splitlines()
    predicted, counted = (next(text for text in said if word in text).split() for word in ("predicted ", "counted "))
    assert predicted[-1] and [float(x) for x in predicted[3:6]] == [float(x) for x in counted[1:4]]
    thin = sum(p.numel() for n, p in logical_parameters(trainer.model) if "lora" in n)
    assert float(counted[2]) == pytest.approx(4 * thin / 2**20, abs=0.006)
