"""FLOPs against closed forms and published runs."""

from __future__ import annotations

import contextlib

import pytest

from minimegatron.config import TransformerConfig
from minimegatron.footprint import kinds
from minimegatron.footprint.gpu import attention_pairs
from minimegatron.models.chunks import count_parameters
from minimegatron.models.families import family_config, preset
from minimegatron.training.flops import forward_flops, peak_tflops, step_flops


def gpt(h: int, layers: int, heads: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=layers, hidden_size=h, num_attention_heads=heads, vocab_size=51200, max_position_embeddings=2048
    )


@pytest.mark.parametrize(
    "h, layers, heads, batch, flops, seconds, gpus, mfu",
    [  # Korthikanti et al. 2022 (arXiv 2205.05198), table 5: 22B, 175B, 530B, 1T on A100s, full square of attention
        (6144, 48, 64, 4, 1.1436e15, 1.10, 8, 41.65),
        (12288, 96, 96, 64, 1.4109e17, 13.75, 64, 51.39),
        (20480, 105, 128, 280, 1.8522e18, 37.83, 280, 56.05),
        (25600, 128, 160, 512, 6.4259e18, 71.49, 512, 56.27),
    ],
)
def test_published_runs(h, layers, heads, batch, flops, seconds, gpus, mfu):
    found = step_flops(gpt(h, layers, heads), batch, 2048, causal=False)
    assert found == pytest.approx(flops, rel=1e-4)
    peak = peak_tflops("NVIDIA A100-SXM4-80GB")
    assert 100 * found / seconds / gpus / 1e12 / peak == pytest.approx(mfu, abs=0.01)


@pytest.mark.parametrize(
    "name",
    ["gpt2-124m", "llama3-8b", "gemma2-2b", "qwen1.5-moe-a2.7b", "deepseek-v3", "nemotron-h-8b", "gpt-oss-20b"],
)
def test_shapes_alone_give_the_products_that_torch_gives(name, monkeypatch):
    def products():
        kinds._PRODUCTS.clear()
        return kinds.forward_products(TransformerConfig.from_dict(preset(name)), 256)

    fast = products()
    monkeypatch.setattr(kinds, "ShapesAlone", contextlib.nullcontext)
    assert fast == products()


def test_the_closed_form_of_a_plain_gpt():
    config, b, s = gpt(1024, 24, 16), 3, 512
    h, layers, v = 1024, 24, 51200
    closed = 72 * b * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    assert step_flops(config, b, s, causal=False) == pytest.approx(closed, rel=1e-12)


def test_the_closed_form_of_mamba():
    """Projections, four taps, and in each of 8 chunks of 128 tokens C B^T, the weights by x, the states written, read
    and carried."""
    config, s, chunk = TransformerConfig.from_dict(preset("mamba2-130m")), 1024, 128
    h, inner, n, heads = 768, 1536, 128, 24
    of_token = 2 * h * (2 * inner + 2 * n + heads) + 2 * inner * h + 2 * 4 * (inner + 2 * n)
    of_token += 2 * chunk * (n + inner) + 4 * inner * n
    carried = 2 * (s // chunk + 1) ** 2 * inner * n
    assert forward_flops(config, s)["attention"] == pytest.approx(24 * (s * of_token + carried), rel=1e-12)
    assert forward_flops(config, s)["mlp"] == 0


def test_the_closed_form_of_the_delta_rule():
    """Projections, four taps a channel, and in each chunk of 64 tokens: K K^T, Q K^T, the system, W S, Q S, the weights
    by u, K^T u."""
    config = family_config(
        "qwen3_next", num_layers=2, linear_attention_freq="[1,1]", hidden_size=64, num_attention_heads=4, num_experts=4,
        moe_router_topk=2, moe_shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=6,
        linear_key_head_dim=16, linear_value_head_dim=24, vocab_size=256,
    )  # fmt: skip
    s, h, chunk, groups, heads, k, v = 256, 64, 64, 2, 6, 16, 24
    projections = 2 * h * (2 * groups * k + 2 * heads * v + 2 * heads) + 2 * heads * v * h
    taps = 2 * 4 * (2 * groups * k + heads * v)
    rule = 4 * chunk * k * groups + heads * (chunk * (k + v) + 2 * chunk * v + 6 * k * v)
    assert forward_flops(config, s)["attention"] == pytest.approx(2 * s * (projections + taps + rule), rel=1e-12)


def test_causal_attention_counts_half_the_square_and_nothing_else():
    config = gpt(1024, 24, 16)
    full, half = forward_flops(config, 512, causal=False), forward_flops(config, 512)
    assert full["mlp"] == half["mlp"] and full["logits"] == half["logits"]
    assert full["attention"] - half["attention"] == 24 * 4 * 1024 * 512**2 / 2


def test_grouped_queries_and_gates():
    config = family_config(
        "llama", num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=24,
        ffn_hidden_size=96, vocab_size=256,
    )  # fmt: skip
    s = 10
    parts = forward_flops(config, s)
    assert parts["mlp"] == 2 * 2 * s * 64 * 96 * 3
    assert parts["attention"] == 2 * (2 * s * 64 * 24 * (4 + 2 + 2 + 4) + 4 * 4 * 24 * s * s / 2)
    assert parts["logits"] == 2 * s * 64 * 256


def test_six_flops_a_parameter_and_token_when_the_sequence_is_short():
    config = family_config("llama", num_layers=4, hidden_size=512, num_attention_heads=8, vocab_size=1024)
    matrices = count_parameters(config) - 1024 * 512  # looking up an embedding is no multiplication
    assert step_flops(config, 1, 1) == pytest.approx(6 * matrices, rel=0.01)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_six_flops_a_parameter_that_a_token_passes(family):
    config = family_config(
        family, num_layers=3, hidden_size=256, num_attention_heads=8, vocab_size=1024, num_experts=16,
        moe_router_topk=2, moe_layer_freq="[0,1,1]", moe_shared_expert_intermediate_size=512, q_lora_rank=96
        if family == "deepseek_v3" else None,
    )  # fmt: skip
    matrices = count_parameters(config, active=True) - 1024 * 256
    assert step_flops(config, 1, 1) == pytest.approx(6 * matrices, rel=0.01)


@pytest.mark.parametrize("s, window", [(8, 3), (8, 8), (8, 100), (64, 16)])
def test_pairs_of_a_sliding_window(s, window):
    exact = sum(min(i + 1, window) for i in range(s))
    # The convention counts s/2 keys where (s+1)/2 are seen; it is off by half a key a query.
    assert attention_pairs(s, window) == exact - min(s, window) / 2


def test_peaks_by_the_names_that_torch_reports():
    names = {
        "NVIDIA H100 80GB HBM3": 989.5, "NVIDIA H100 PCIe": 756.0, "NVIDIA H200": 989.5, "NVIDIA GH200 480GB": 989.5,
        "NVIDIA L4": 121.0, "NVIDIA L40S": 362.0, "NVIDIA GB200": 2500.0, "NVIDIA B200": 2250.0, "Tesla T4": None,
        "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA A10": 125.0, "NVIDIA GeForce RTX 3090": 71.0,
        "NVIDIA RTX A1000": None, "NVIDIA GeForce RTX 3090 Ti": None, "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    }  # fmt: skip
    assert {name: peak_tflops(name) for name in names} == names


def test_windows_in_every_other_layer_are_half_of_the_windows():
    sizes = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}
    windows = ({}, {"sliding_window": 64}, {"sliding_window": 64, "window_attn_skip_freq": "2"})
    all_tokens, windowed, mixed = (
        forward_flops(family_config("llama", **sizes, **window), 512)["attention"] for window in windows
    )
    assert windowed < mixed == (all_tokens + windowed) / 2
