"""Ask Megatron for the gradient of a model that predicts two tokens after the next, parameter by parameter.

Weights are drawn from parameter names as in `tests/oracle/moe.py`: 0.05 times normal, plus 1 in norms. One batch of two
samples, every token counts, the loss is the *sum* over tokens (`calculate_per_token_loss`), weights of the depths
0.5 / 2. `grad_norms` are of every parameter under Megatron's names, which are ours.
"""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.oracle import megatron_cpu
from tests.oracle.moe import seeded

MODEL: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
DEPTHS = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}


def make() -> dict[str, Any]:
    """The sum of the next token's losses, and the norm of every gradient."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder,), 1)
        return {"model": {**MODEL, **DEPTHS}, **torch.load(f"{folder}/results.pt", weights_only=True)}


def _rank(_: int, folder: str) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.set_num_threads(1)
    megatron_cpu.install()
    megatron_cpu.patch_megatron()
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        **MODEL,
        **DEPTHS,
        calculate_per_token_loss=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        pipeline_dtype=torch.float32,
    )
    spec = get_gpt_layer_local_spec()
    model = GPTModel(
        config,
        spec,
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )
    for name, parameter in model.named_parameters():
        weight = seeded(name, tuple(parameter.shape)) * 0.05
        parameter.data.copy_(weight + 1 if "norm" in name else weight)
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(7))
    places, masked = torch.arange(16).expand(2, 16).contiguous(), torch.triu(torch.ones(1, 1, 16, 16), 1).bool()
    losses = model(
        ids[:, :-1].contiguous(), places, masked, labels=ids[:, 1:].contiguous(), loss_mask=torch.ones(2, 16)
    )
    losses.sum().backward()
    norms = {name: round(p.grad.double().norm().item(), 6) for name, p in model.named_parameters()}
    torch.save({"loss": round(losses.double().sum().item(), 5), "grad_norms": norms}, f"{folder}/results.pt")
    dist.destroy_process_group()
