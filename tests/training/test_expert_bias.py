"""Expert biases move with the weights: not in a step that is refused."""

from __future__ import annotations

import math

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, TransformerConfig
from minimegatron.errors import NumericsError
from minimegatron.models.decoder import build_model
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.schedule import OptimizerParamScheduler, Schedule
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.training.step import forward_step, train_step

CONFIG = TransformerConfig(
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=32,
    num_experts=4,
    moe_ffn_hidden_size=8,
    add_bias_linear=False,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)


@pytest.mark.parametrize("broken", ["nothing", "loss", "gradient"])
def test_a_step_that_is_refused_moves_no_bias(broken):
    model = DistributedDataParallel(build_model(CONFIG, Mesh.serial(), 0), Mesh.serial())
    optimizer = build_optimizer(OptimizerConfig(), model, Mesh.serial())
    schedule = Schedule.from_config(OptimizerConfig(), global_batch_size=2, train_iters=4)

    def forward(batches, model):
        output, loss = forward_step(batches, model)
        if broken == "gradient":
            output.register_hook(lambda grad: grad * math.nan)
        return output * math.nan if broken == "loss" else output, loss

    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": torch.ones(2, 8)}

    def step() -> None:
        scheduler = OptimizerParamScheduler(optimizer.param_groups, schedule)
        train_step(forward, iter([batch]), model, optimizer, scheduler, num_microbatches=1)

    if broken == "nothing":
        step()
    else:
        with pytest.raises(NumericsError):
            step()
    biases = [bias for name, bias in model.named_parameters() if name.endswith("expert_bias")]
    assert len(biases) == 2 and all(bool(bias.any()) == (broken == "nothing") for bias in biases)
