"""One mixture-of-experts layer and three steps of training, with Megatron-Core's numbers, in every layout.

The numbers were printed by megatron-core 0.16.1 on the CPU (`tests/oracle/moe.py`). Weights are drawn
from Megatron's names of them, so both programs start from the same.

What is compared: the sum of |y|, the squared norm of dx, the norm of the router's gradient, for a loss sum y^2.
Megatron's penalties are means over a microbatch, and its loss is not divided; ours are weighted by its tokens, so
`loss_scale` is 1 / tokens here. With dp = 2 each rank's tokens are a microbatch of their own, in both programs.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from minimegatron.comm import collectives as c
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig, TransformerConfig
from minimegatron.layers.logical import load_logical
from minimegatron.layers.moe.layer import MoELayer
from minimegatron.layers.param import ParamLayout, layout_of, logical_parameters
from minimegatron.models.decoder import GPTModel
from minimegatron.optim.build import build_optimizer
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.data.finalize import finalize_model_grads
from tests import golden

TP, SP, EP, ETP = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
PENALTIES = {"moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 1e-3}
FROZEN = golden.load("moe")
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {EP: 2}),
    (2, {TP: 2, SP: True}),
    (2, {TP: 2, SP: True, EP: 2, ETP: 1}),
    (4, {TP: 2, SP: True, EP: 2, ETP: 2}),
    (4, {TP: 2, SP: True, EP: 4, ETP: 1}),
]


def seeded(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A full tensor from Megatron's name of it."""
    seed = int(hashlib.md5(name.encode()).hexdigest()[:8], 16)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def layer_numbers(rank: int, world: int, layout: dict[str, Any], options: dict[str, Any]) -> list[float]:
    """The three numbers of the module docstring, over all ranks."""
    mesh = Mesh.build(ParallelConfig(**layout))
    config = TransformerConfig(
        hidden_size=32, num_experts=4, moe_ffn_hidden_size=64, add_bias_linear=False, activation="gelu", **options
    )
    layer = MoELayer(config, mesh)
    tensors = {
        "router.weight": seeded("router.weight", (4, 32)),
        "experts.weight1": torch.stack(
            [seeded(f"experts.local_experts.{e}.linear_fc1.weight", (64, 32)) for e in range(4)]
        ),
        "experts.weight2": torch.stack(
            [seeded(f"experts.local_experts.{e}.linear_fc2.weight", (32, 64)) for e in range(4)]
        ),
    }
    if layer.router.expert_bias is not None:
        tensors["router.expert_bias"] = torch.zeros(4)
    load_logical(layer, tensors)
    whole = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(3))
    x = c.local_part(c.local_part(whole, mesh.dp, 1), mesh.tp, 0).clone().requires_grad_()
    layer.router.loss_scale = 1.0 / (x.shape[0] * x.shape[1] * mesh.tp.size)
    y = layer(x)
    y.square().sum().backward()
    sums = torch.stack([y.double().abs().sum(), x.grad.double().square().sum()])
    router = c.all_reduce(layer.router.weight.grad.double().clone(), mesh.world).norm()
    return [*c.all_reduce(sums, mesh.world).tolist(), router.item()]


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("world, layout", LAYOUTS, ids=str)
def test_layer(ranks, world, layout, dispatcher):
    dp = world // layout.get(TP, 1)
    penalised = "penalties" if dp == 1 else "penalties, dp 2"
    for options, name in (({}, "plain"), (PENALTIES, penalised)):
        for got in ranks(world).run(layer_numbers, layout, {**options, "moe_token_dispatcher_type": dispatcher}):
            assert got == pytest.approx(FROZEN["layer"][name], abs=5e-6, rel=2e-7)


@pytest.mark.parametrize(
    "options, name",
    [
        (
            {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
            "capacity 1, padded",
        ),
        (
            {
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_load_balancing_type": "none",
            },
            "sigmoid with bias",
        ),
    ],
)
@pytest.mark.parametrize("dispatcher, grouped", [("allgather", False), ("alltoall", True)])
def test_other_routers(options, name, dispatcher, grouped):
    options = {**options, "moe_token_dispatcher_type": dispatcher, "moe_grouped_gemm": grouped}
    assert layer_numbers(0, 1, {}, options) == pytest.approx(FROZEN["layer"][name], abs=5e-6, rel=2e-7)


# ------------------------------------------------------------------------------------------ three training steps


def trained(rank: int, world: int, layout: dict[str, Any], dispatcher: str) -> list[tuple[float, float]]:
    """(mean loss before each step, norm of the gradient before clipping), four microbatches a step."""
    mesh = Mesh.build(ParallelConfig(**layout))
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        vocab_size=64,
        make_vocab_size_divisible_by=16,
        position_embedding_type="rope",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        num_experts=4,
        moe_token_dispatcher_type=dispatcher,
        moe_router_load_balancing_type="none",
    )
    model = GPTModel(config, mesh)
    load_logical(model, {n: megatron_weight(n, layout_of(p)) for n, p in logical_parameters(model)})
    ddp = DistributedDataParallel(model, mesh)
    optimizer = build_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.01, clip_grad=1.0, adam_beta2=0.999), ddp, mesh)
    for group in optimizer.param_groups:  # the run had no scheduler, without which Megatron decays norms as well
        group["weight_decay"] = 0.01
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randint(0, 64, (2, 17), generator=generator) for _ in range(4)][mesh.dp.rank :: mesh.dp.size]
    trace = []
    for _ in range(3):
        ddp.zero_grad_buffer()
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            losses = ddp(batch[:, :-1], labels=batch[:, 1:])
            losses.sum().backward()
            total += losses.detach().double().sum()
        count = finalize_model_grads(ddp, mesh, torch.tensor(float(32 * len(batches))))
        norm = optimizer.step().grad_norm
        trace.append(((c.all_reduce(total, mesh.dp_cp) / count).item(), norm))
    return trace


def megatron_weight(name: str, layout: ParamLayout) -> torch.Tensor:
    """The logical tensor of ours from Megatron's names: 0.05 times normal, plus 1 in norms, biases included."""
    if layout.experts is not None:
        matrix = {"weight1": "linear_fc1", "weight2": "linear_fc2"}[name.rsplit(".", 1)[1]]
        parts = [f"{name.rsplit('.', 1)[0]}.local_experts.{e}.{matrix}.weight" for e in range(layout.shape[0])]
        return torch.stack([seeded(part, layout.shape[1:]) / 2 for part in parts])
    weight = seeded(name, layout.shape) / 2
    return weight + 1 if "layernorm" in name else weight


@pytest.mark.parametrize(
    "world, layout, dispatcher",
    [
        (1, {}, "alltoall"),
        (2, {EP: 2}, "allgather"),
        (2, {ETP: 2}, "alltoall"),  # Megatron-Core 0.16.1 gives 1.24712 here: it does not reduce experts
        (4, {TP: 2, SP: True, EP: 2, ETP: 1}, "alltoall"),
    ],
    ids=str,
)
def test_training(ranks, world, layout, dispatcher):
    for trace in ranks(world).run(trained, layout, dispatcher):
        for got, want in zip(trace, FROZEN["trace"], strict=True):
            assert list(got) == pytest.approx(want, abs=2e-6)
