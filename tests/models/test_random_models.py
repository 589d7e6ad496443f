"""Random configurations of the families with many parts of their own: logits are those of transformers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from minimegatron.checkpoint.hf_config import config_from_huggingface
from minimegatron.checkpoint.huggingface import state_from_huggingface
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.logical import load_logical
from minimegatron.models.decoder import GPTModel
from tests.thorough import mostly_thorough

TOKENS = 48
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
KINDS = ("sliding_attention", "full_attention")


def scaled(draw: random.Random) -> dict[str, Any]:
    """One of the scalings of RoPE."""
    factor = draw.choice([1.5, 4.0, 32.0])
    return draw.choice(
        [
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": factor},
            {"rope_type": "yarn", "factor": factor, "truncate": draw.random() < 0.5,
             "original_max_position_embeddings": draw.choice([8, 32]), "beta_fast": 32.0, "beta_slow": 1.0},
            {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": draw.choice([8, 32])},
        ]
    )  # fmt: skip


def sizes(draw: random.Random) -> dict[str, Any]:
    groups, layers = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    heads = groups * draw.choice([1, 2, 4])
    return {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups,
        "hidden_size": 8 * heads, "head_dim": draw.choice([4, 6, 16]), "intermediate_size": draw.choice([24, 32, 50]),
        "vocab_size": draw.choice([40, 77]), "sliding_window": draw.choice([1, 3, 5, 64]),
        "layer_types": draw.choice([None, [draw.choice(KINDS) for _ in range(layers)]]),
        "rms_norm_eps": draw.choice([1e-6, 1e-3]), "tie_word_embeddings": draw.random() < 0.5,
    }  # fmt: skip


def gpt_oss(draw: random.Random) -> dict[str, Any]:
    experts = draw.choice([2, 5, 8])
    return {
        **sizes(draw), "num_local_experts": experts, "num_experts_per_tok": draw.randint(2, experts),
        "swiglu_limit": draw.choice([0.05, 0.5, 7.0]),
        "rope_parameters": {"rope_theta": draw.choice([100.0, 150000.0]), **scaled(draw)},
    }  # fmt: skip


def gemma3(draw: random.Random) -> dict[str, Any]:
    full = {"rope_theta": draw.choice([100.0, 1e6]), **scaled(draw)}
    return {
        **sizes(draw), "query_pre_attn_scalar": draw.choice([4, 10, 256]),
        "hidden_activation": draw.choice(["gelu_pytorch_tanh", "silu"]),
        "final_logit_softcapping": draw.choice([None, 2.0]),
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
    }  # fmt: skip


FAMILIES = {"GptOssConfig": gpt_oss, "Gemma3TextConfig": gemma3}


@pytest.mark.parametrize(
    ("cls", "seed"),
    mostly_thorough([(cls, seed) for cls in FAMILIES for seed in range(30)], lambda case: case[1] < 2),
)
def test_logits_are_transformers(cls, seed):
    import transformers

    fields = FAMILIES[cls](random.Random(f"{cls} {seed}"))
    torch.manual_seed(seed)
    config = getattr(transformers, cls)(**fields)
    theirs = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    tokens = torch.randint(0, fields["vocab_size"], (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    family, ours_config = config_from_huggingface(config.to_dict())
    with torch.no_grad():
        for param in theirs.parameters():
            param.add_(0.05 * torch.randn_like(param))
        ours = GPTModel(ours_config, Mesh.serial()).eval()
        load_logical(ours, state_from_huggingface(theirs.state_dict(), ours_config, family))
        assert (ours.full_logits(tokens) - theirs(tokens).logits).abs().max() <= 1e-5, fields
