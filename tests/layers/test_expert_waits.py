"""A layer with experts makes the host wait once, for counts: not in the backward pass, and not when computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.layers.logical import initialize
from minimegatron.layers.moe.layer import MoELayer
from minimegatron.layers.moe.router import LOOK, TINY, TOLERANCE, sinkhorn
from minimegatron.layers.recompute import recompute, to_host
from minimegatron.models.decoder import build_model
from tests.waits import waits

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"moe_grouped_gemm": True, "params_dtype": "bf16"},
    "losses": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1},
    "capacity": {"moe_expert_capacity_factor": 0.7},
    "padded": {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
    "bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "shared": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_overlap": True},
}


def config(dispatcher: str = "alltoall", **fields: Any) -> TransformerConfig:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 32, "num_experts": 4, "moe_ffn_hidden_size": 16}
    return TransformerConfig(**sizes, add_bias_linear=False, moe_token_dispatcher_type=dispatcher, **fields)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_waits_for_its_counts(kind, dispatcher):
    made = config("alltoall" if kind == "shared" else dispatcher, **KINDS[kind])
    layer = MoELayer(made, Mesh.serial())
    initialize(layer, 1)
    x = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(0)).to(made.dtype).requires_grad_()
    with waits() as forward:
        y = layer(x)
    dy = torch.ones_like(y)
    with waits() as backward:
        y.backward(dy)
    assert forward == ["tolist"] and backward == []
    assert x.grad is not None and x.grad.any() and layer.router.weight.grad is not None


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("kind", ["plain", "capacity", "padded"])
def test_kernels_move_the_same_rows(kind, dispatcher):
    found = []
    for wish in ("torch", "emulated"):
        layer = MoELayer(config(dispatcher, activation="swiglu", kernels=wish, **KINDS[kind]), Mesh.serial())
        initialize(layer, 1)
        x = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with waits() as forward:
            y = layer(x)
        with waits() as backward:
            y.square().sum().backward()
        assert forward.count("tolist") == 1 and not [w for w in forward + backward if "mask" in w or "nonzero" in w]
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_what_is_computed_again_is_not_read_again():
    made = config(num_layers=2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    grads = []
    for each in (made, config(num_layers=2)):
        model = build_model(each, Mesh.serial(), 1)
        loss = model(ids, labels=ids).sum()
        with waits() as found:
            loss.backward()
        assert found == []
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_the_second_run_gets_the_numbers_of_the_first_in_order_every_time():
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append([to_host(torch.tensor([len(seen)])), to_host(torch.tensor([10 + len(seen)]))])
        return (x * x).sin() * x

    x = torch.ones(3, requires_grad=True)
    y = recompute(function, x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [[[0], [10]]] * 3 and to_host(torch.tensor([5])) == [5]


@pytest.mark.parametrize("sharp", [0.01, 1.0, 6.0])
def test_sinkhorn_stops_where_a_look_after_every_sweep_would(sharp):
    logits = sharp * torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    c = (logits.double() - logits.double().amax(1, keepdim=True)).exp()
    columns, sweeps = c.new_ones(8), 0
    while True:
        sweeps += 1
        rows = 1 / (64 * ((c @ columns) + TINY))
        before, columns = columns, 1 / (8 * ((rows @ c) + TINY))
        if not (columns - before).abs().mean() > TOLERANCE:
            break
    with waits() as found:
        got = sinkhorn(logits, Mesh.serial().world)
    assert torch.equal(got, rows[:, None] * c * columns)
    assert len(found) <= max(1, (sweeps - 1).bit_length() - LOOK.bit_length() + 2) < max(sweeps, 2)
