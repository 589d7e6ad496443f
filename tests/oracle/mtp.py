"""Ask Megatron for the gradient of a model that predicts two tokens after the next, parameter by parameter.

Weights are drawn from parameter names as in `tests/oracle/moe.py`: 0.05 times normal, plus 1 in norms. One batch of two
samples, every token counts, the loss is the *sum* over tokens (`calculate_per_token_loss`), weights of the depths
0.5 / 2. `grad_norms` are of every parameter under Megatron's names, which are ours. Once with RoPE, and once with
learned positions, which move with the tokens that a depth embeds.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.oracle import ranks
from tests.oracle.moe import fill

MODEL: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
DEPTHS = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}


POSITIONS = ("rope", "learned_absolute")


def make() -> dict[str, Any]:
    """For each kind of positions: the sum of the next token's losses, and the norm of every gradient."""
    return {"model": {**MODEL, **DEPTHS}, "positions": ranks.run(_works, 1)}


def _works(_: int, __: int) -> dict[str, Any]:
    return {positions: _work(positions) for positions in POSITIONS}


def _work(positions: str) -> dict[str, Any]:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **MODEL,
        **DEPTHS,
        calculate_per_token_loss=True,
        add_bias_linear=False,
        **ranks.PLAIN_CONFIG,
    )
    spec = get_gpt_layer_local_spec()
    model = GPTModel(
        config,
        spec,
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type=positions,
        share_embeddings_and_output_weights=False,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )
    fill(model)
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(7))
    places, masked = torch.arange(16).expand(2, 16).contiguous(), torch.triu(torch.ones(1, 1, 16, 16), 1).bool()
    losses = model(
        ids[:, :-1].contiguous(), places, masked, labels=ids[:, 1:].contiguous(), loss_mask=torch.ones(2, 16)
    )
    losses.sum().backward()
    norms = {name: round(p.grad.double().norm().item(), 6) for name, p in model.named_parameters()}
    return {"loss": round(losses.double().sum().item(), 5), "grad_norms": norms}
