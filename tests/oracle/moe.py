"""Ask Megatron for one mixture-of-experts layer, with several routers, and for three steps of training with experts.

Weights are drawn from parameter names, with the experts' global numbers: `0.1 * randn` (training: 0.05, plus 1 in
norms) from a generator seeded by the first 8 hex digits of md5(name). The layer's input is one batch [16, 2, 32], cut
over dp; the loss is the sum of y^2, and Megatron's scale of penalties is 1.

`layer[router]` = [sum |y|, |dx|^2, norm of the router's gradient] summed over the ranks of `dp`; `trace[i]` = [mean
loss before step i, norm of the gradient before clipping].
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from tests.oracle import ranks

PLAIN: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}
# name -> (ranks, all of dp; fields of Megatron's TransformerConfig)
ROUTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, PLAIN),
    "penalties": (1, {**PLAIN, "moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 1e-3}),
    "penalties, dp 2": (2, {**PLAIN, "moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 1e-3}),
    "capacity 1, padded": (
        1,
        {**PLAIN, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    ),
    "sigmoid with bias": (
        1,
        {
            "moe_router_load_balancing_type": "none",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
    ),
}


def seeded(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Standard normal numbers from a name."""
    seed = int(hashlib.md5(name.encode()).hexdigest()[:8], 16)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make() -> dict[str, Any]:
    """The numbers of every router, and of the training."""
    layer = {name: ranks.run(_work, world, name) for name, (world, _) in ROUTERS.items()}
    return {"layer": layer, "trace": ranks.run(_work, 1, "training")}


def fill(model: torch.nn.Module) -> None:
    """Weights from names: 0.05 times normal, plus 1 in norms."""
    for name, parameter in model.named_parameters():
        weight = seeded(name, tuple(parameter.shape)) * 0.05
        parameter.data.copy_(weight + 1 if "norm" in name else weight)


def _work(rank: int, world: int, what: str) -> Any:
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # without Transformer Engine the name does not exist, and is asked for
    return _train() if what == "training" else _layer(rank, world, ROUTERS[what][1])


def _config(**fields: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=64,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        **ranks.PLAIN_CONFIG,
        **fields,
    )


def _layer(rank: int, world: int, fields: dict[str, Any]) -> list[float]:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module

    spec = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)
    layer = build_module(spec, config=_config(num_layers=1, **fields))
    layer.set_layer_number(1)
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(seeded(name, tuple(parameter.shape)) * 0.1)
    whole = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(3))
    x = whole.chunk(world, 1)[rank].clone().requires_grad_()
    y, _ = layer(x)
    y.square().sum().backward()
    sums = torch.stack([y.double().abs().sum(), x.grad.double().square().sum()])
    router = layer.router.weight.grad.double().clone()
    dist.all_reduce(sums)
    dist.all_reduce(router)
    return [round(value, 6) for value in (*sums.tolist(), router.norm().item())]


def experts() -> tuple[Any, torch.nn.Module]:
    """A model of two layers with experts, and its configuration."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = _config(num_layers=2, moe_router_load_balancing_type="none")
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    model = GPTModel(
        config,
        spec,
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    fill(model)
    return config, model


def _train() -> list[list[float]]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.oracle.gpt import _forward_step

    config, model = experts()
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, weight_decay=0.01), [ddp]
    )
    config.grad_scale_func = optimizer.scale_loss
    generator, trace = torch.Generator().manual_seed(7), []
    batches = [torch.randint(0, 64, (2, 17), generator=generator) for _ in range(4)]
    for _ in range(3):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(batches),
            model=ddp,
            num_microbatches=4,
            seq_length=16,
            micro_batch_size=2,
            forward_only=False,
        )
        norm = optimizer.step()[1]
        trace.append([round(sum(loss["loss"].item() for loss in losses) / 4, 6), round(float(norm), 6)])
    return trace
