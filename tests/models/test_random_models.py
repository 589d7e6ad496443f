"""Random configurations of the families with many parts of their own: logits, every gradient and the
files both ways are transformers'.

Each draws sizes, heads, groups, windows, positions and whatever else its family may vary; norms are not 1, biases are
not 0. T5 has its own in `test_t5`.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from tests.models import test_bert, test_llava, test_vision
from tests.models.test_huggingface import a_model, assert_same_in_fp64, assert_there_and_back
from tests.thorough import mostly_thorough

TOKENS = 48
KINDS = ("sliding_attention", "full_attention")

Fields = dict[str, Any]


def scaled(draw: random.Random) -> Fields:
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


def decoder(draw: random.Random) -> Fields:
    """Sizes that all have."""
    groups = draw.choice([1, 2, 3])
    heads = groups * draw.choice([1, 2, 4])
    return {
        "num_hidden_layers": draw.choice([1, 2, 3]), "num_attention_heads": heads, "num_key_value_heads": groups,
        "hidden_size": 8 * heads, "head_dim": draw.choice([4, 6, 16]), "intermediate_size": draw.choice([24, 32, 50]),
        "vocab_size": draw.choice([40, 77]), "rms_norm_eps": draw.choice([1e-6, 1e-3]),
        "tie_word_embeddings": draw.random() < 0.5,
    }  # fmt: skip


def windows(draw: random.Random, layers: int) -> Fields:
    kinds = draw.choice([None, [draw.choice(KINDS) for _ in range(layers)]])
    return {"sliding_window": draw.choice([1, 3, 5, 64]), "layer_types": kinds}


def gpt_oss(draw: random.Random) -> Fields:
    sizes, experts = decoder(draw), draw.choice([2, 5, 8])
    return {
        **sizes, **windows(draw, sizes["num_hidden_layers"]), "num_local_experts": experts,
        "num_experts_per_tok": draw.randint(2, experts), "swiglu_limit": draw.choice([0.05, 0.5, 7.0]),
        "rope_parameters": {"rope_theta": draw.choice([100.0, 150000.0]), **scaled(draw)},
    }  # fmt: skip


def gemma3(draw: random.Random) -> Fields:
    sizes, full = decoder(draw), {"rope_theta": draw.choice([100.0, 1e6]), **scaled(draw)}
    return {
        **sizes, **windows(draw, sizes["num_hidden_layers"]), "query_pre_attn_scalar": draw.choice([4, 10, 256]),
        "hidden_activation": draw.choice(["gelu_pytorch_tanh", "silu"]),
        "final_logit_softcapping": draw.choice([None, 2.0]),
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
    }  # fmt: skip


def mamba2(draw: random.Random) -> Fields:
    groups, width = draw.choice([1, 2, 3]), draw.choice([2, 4, 8])
    heads, expand = groups * draw.choice([2, 4]), draw.choice([1, 2])
    return {
        "num_heads": heads, "head_dim": width, "n_groups": groups, "expand": expand,
        "hidden_size": heads * width // expand, "state_size": draw.choice([1, 3, 12]),
        "num_hidden_layers": draw.choice([1, 2, 3]), "vocab_size": draw.choice([40, 77]),
        "chunk_size": draw.choice([1, 5, 16, 64]), "conv_kernel": draw.choice([2, 3, 4]),
        "time_step_limit": draw.choice([(0.0, float("inf")), (0.3, 0.8), (0.0, 0.8)]),
        "layer_norm_epsilon": draw.choice([1e-6, 1e-3]), "tie_word_embeddings": draw.random() < 0.5,
    }  # fmt: skip


def nemotron_h(draw: random.Random) -> Fields:
    sizes, groups = decoder(draw), draw.choice([1, 2, 3])
    of_experts, kept = draw.choice([1, 2, 4]), draw.choice([1, 2])
    grouped = of_experts > 1
    chosen = 2 * kept if grouped else draw.choice([1, 3])
    for name in ("num_hidden_layers", "rms_norm_eps", "tie_word_embeddings"):
        del sizes[name]
    return {
        **sizes, "hybrid_override_pattern": "".join(draw.choices("ME*-", k=draw.randint(1, 5))),
        "layer_norm_epsilon": draw.choice([1e-5, 1e-3]),
        "ssm_state_size": draw.choice([1, 3, 12]), "mamba_num_heads": groups * draw.choice([1, 2, 4]),
        "mamba_head_dim": draw.choice([2, 5, 8]), "n_groups": groups, "chunk_size": draw.choice([1, 5, 16, 64]),
        "conv_kernel": draw.choice([2, 3, 4]), "time_step_min": draw.choice([0.001, 0.6]),
        "mlp_hidden_act": draw.choice(["relu2", "silu"]), "n_routed_experts": 4 * of_experts,
        "n_group": of_experts if grouped else 1, "topk_group": kept if grouped else 1,
        "num_experts_per_tok": chosen, "norm_topk_prob": chosen > 1,
        "moe_intermediate_size": draw.choice([12, 40]), "moe_shared_expert_intermediate_size": draw.choice([12, 56]),
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
    }  # fmt: skip


def qwen3_next(draw: random.Random) -> Fields:
    sizes, keys, experts = decoder(draw), draw.choice([1, 2, 3]), draw.choice([2, 5, 8])
    layers, chosen = sizes["num_hidden_layers"], draw.randint(1, experts)
    turned = draw.choice([0.25, 0.5, 1.0])
    kinds = ["linear_attention", *draw.choices(["linear_attention", "full_attention"], k=layers - 1)]
    interval = draw.choice([{"full_attention_interval": draw.choice([2, 3])}, {"layer_types": kinds}])
    return {
        **sizes, **interval, "head_dim": draw.choice([8, 16]), "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.choice([1, 2, 3]), "linear_key_head_dim": draw.choice([2, 5, 12]),
        "linear_value_head_dim": draw.choice([2, 5, 12]), "linear_conv_kernel_dim": draw.choice([2, 3, 4]),
        "num_experts": experts, "num_experts_per_tok": chosen,
        "norm_topk_prob": chosen > 1 and draw.random() < 0.5, "moe_intermediate_size": draw.choice([12, 40]),
        "shared_expert_intermediate_size": draw.choice([12, 56]),
        **(draw.choice([{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {}]) if layers > 1 else {}),
        "rope_parameters": {"rope_theta": draw.choice([100.0, 1e6]), "partial_rotary_factor": turned, **scaled(draw)},
    }  # fmt: skip


DECODERS = {
    "GptOssConfig": gpt_oss,
    "Gemma3TextConfig": gemma3,
    "Mamba2Config": mamba2,
    "NemotronHConfig": nemotron_h,
    "Qwen3NextConfig": qwen3_next,
}


def same_decoder(draw: random.Random, seed: int, cls: str) -> None:
    """Without the token 0: where it is for padding, transformers gives its embedding no gradient."""
    fields = DECODERS[cls](draw)
    ids = torch.randint(1, fields["vocab_size"], (2, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    theirs = a_model(cls, fields, seed, noise=0.2)
    assert_there_and_back(theirs.config.to_dict(), theirs.state_dict())
    assert_same_in_fp64(theirs, ids[:, :-1], ids[:, 1:])


def in_fp32(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in state.items()}


def same_bert(draw: random.Random, seed: int) -> None:
    name, heads = draw.choice(test_bert.CLASSES), draw.choice([1, 2, 3, 4])
    fields = {
        "num_hidden_layers": draw.choice([1, 2, 3]), "num_attention_heads": heads,
        "hidden_size": heads * draw.choice([4, 7, 16]), "intermediate_size": draw.choice([24, 50]),
        "vocab_size": draw.choice([40, 77]), "type_vocab_size": draw.choice([2, 3]),
        "max_position_embeddings": draw.choice([32, 64]), "layer_norm_eps": draw.choice([1e-12, 1e-3]),
        "hidden_act": draw.choice(["gelu", "gelu_new", "relu", "silu"]),
    }  # fmt: skip
    lengths = [draw.randint(2, 32) for _ in range(draw.choice([1, 2, 3]))]
    theirs = test_bert.said(name, fields, torch.tensor(lengths), seed)
    assert_there_and_back(theirs.config, in_fp32(theirs.state))
    test_bert.assert_same(theirs, name)


def text(draw: random.Random, **more: Any) -> Fields:
    """Of a model that sees, whose vocabulary `test_vision` knows."""
    fields = {**test_vision.TEXT, **decoder(draw), **more, "vocab_size": 99}
    if fields.get("head_dim") is None:
        fields.pop("head_dim", None)
    return fields


def same_qwen(draw: random.Random, seed: int) -> None:
    side, patch, heads = draw.choice([1, 2, 3]), draw.choice([2, 4]), draw.choice([1, 2, 3])
    sections = draw.choice([(2, 1, 1), (1, 2, 3), (4, 2, 2)])
    of_text = text(draw, head_dim=None)
    of_text["hidden_size"] = of_text["num_attention_heads"] * 2 * sum(sections)
    of_text["rope_parameters"] = {
        "rope_type": "default", "rope_theta": draw.choice([30.0, 1e6]), "mrope_section": sections
    }  # fmt: skip
    if draw.random() < 0.4:
        of_text |= {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": draw.choice([3, 17])}
    layers = draw.choice([1, 2, 3])
    of_vision = {
        "depth": layers, "num_heads": heads, "hidden_size": 4 * heads * draw.choice([1, 2, 3]), "patch_size": patch,
        "out_hidden_size": of_text["hidden_size"], "intermediate_size": draw.choice([20, 40]),
        "spatial_merge_size": side, "temporal_patch_size": draw.choice([1, 2]),
        "window_size": side * patch * draw.choice([1, 2, 5]),
        "fullatt_block_indexes": sorted(draw.sample(range(layers), draw.randint(0, layers))),
    }  # fmt: skip
    unit = side * patch
    shapes = [
        [(unit * draw.randint(1, 6), unit * draw.randint(1, 5)) for _ in range(draw.randint(i, 2))] for i in (1, 0)
    ]
    length = 5 + max(sum(h * w // unit**2 + 2 for h, w in row) for row in shapes)
    theirs = test_vision.qwen(of_text, of_vision, seed, shapes=shapes, length=length)
    assert_there_and_back(theirs.config, in_fp32(theirs.state))
    test_vision.assert_same(theirs)


def same_llava(draw: random.Random, seed: int) -> None:
    biases, patch, heads = draw.random() < 0.5, draw.choice([2, 4]), draw.choice([1, 2, 3])
    of_text = text(draw, attention_bias=biases, mlp_bias=biases)
    of_text["rope_parameters"] = {"rope_theta": draw.choice([100.0, 1e6]), **scaled(draw)}
    layers = draw.choice([1, 2, 3])
    of_vision = {
        "hidden_size": heads * draw.choice([4, 10, 16]), "num_attention_heads": heads, "num_hidden_layers": layers,
        "intermediate_size": draw.choice([20, 40]), "patch_size": patch, "image_size": patch * draw.choice([1, 2, 4]),
    }  # fmt: skip
    read = draw.choice([*range(-layers, 0), *range(1, layers + 1)])
    counts = (draw.choice([1, 2]), draw.choice([0, 1]))
    theirs = test_llava.said(
        of_text, of_vision, seed, counts, vision_feature_layer=read, tie_word_embeddings=draw.random() < 0.5
    )
    assert_there_and_back(theirs.config, in_fp32(theirs.state))
    test_llava.assert_same(theirs)


SAME: dict[str, Any] = {cls: functools.partial(same_decoder, cls=cls) for cls in DECODERS}
SAME |= {"Bert": same_bert, "Qwen2_5_VL": same_qwen, "Llava": same_llava}


@pytest.mark.parametrize(
    ("model", "seed"),
    mostly_thorough([(model, seed) for model in SAME for seed in range(30)], lambda case: case[1] < 2),
)
def test_a_random_model_is_transformers(model, seed):
    SAME[model](random.Random(f"{model} {seed}"), seed)
