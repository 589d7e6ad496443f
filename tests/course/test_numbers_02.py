"""Every number that lab 02's text states, computed anew: a sentence that drifts from its number fails here."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path

import pytest
import torch

from course.figures.tensor_parallel import columns_of, product, rows_of
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.param import layout_of
from minimegatron.models.decoder import GPTModel
from minimegatron.models.families import family_config

CHECKS = import_module("course.02_tensor_parallel.checks.predicted")
SOURCE = Path(CHECKS.__file__).parents[1] / "lab.py"
TEXT = " ".join(line.removeprefix("#").strip() for line in SOURCE.read_text().splitlines())

H, FFN, VOCAB, LAYERS = 8192, 28672, 128256, 80  # Llama-3 70B, 64 query and 8 key/value heads of 128
WEIGHTS = H * (H + 2 * 1024) + H * H + 3 * H * FFN
GB = 1e9


def gpt3(t: int, sequence_parallel: bool, heads: int = 96) -> float:
    """Bytes per s b h of one layer on one rank."""
    return CHECKS.activation_bytes(2048, 1, 12288, heads, t, sequence_parallel) / (2048 * 12288)


def gpt3_gb(t: int, sequence_parallel: bool) -> str:
    return f"{CHECKS.activation_bytes(2048, 1, 12288, 96, t, sequence_parallel) / GB:.2f} GB"


def in_this_lab(t: int) -> float:
    """Bytes that the lab's fp32 layer without dropout keeps on one of t ranks, statistics included."""
    s, b, h, a = 128, 2, 64, 4
    return 2 * (CHECKS.activation_bytes(s, b, h, 0, t, False) - 2 * s * b * h) + 4 * (4 * s * b + s * b * a / t)


def elements(sequence_parallel: bool, recompute: str = "none") -> float:
    """How many times s b h (t-1)/t elements one rank sends for a layer."""
    return CHECKS.bytes_per_layer(1, 1, 1, 2, 2, sequence_parallel, recompute)


def zero3_from(hidden: int) -> int:
    """By trying: the first number of tokens with which three times the weights are fewer than the activations."""
    near = 9 * hidden // 2
    return next(tokens for tokens in range(near - 5, near + 5) if 3 * 12 * hidden**2 < 8 * tokens * hidden)


Y = product([[1, 2], [3, 4]], [[5, 6], [7, 8]])
FIRST = columns_of([[1, 2], [3, 4]], [[5, 6], [7, 8]], 2)[0]
PARTS = [share.y[0][0] for share in rows_of([[1, 2], [3, 4]], [[5, 6], [7, 8]], 2)]
ROW = rows_of([[1, 2], [3, 4]], [[5, 6], [7, 8]], 2)[0]

WHOLE = in_this_lab(10**9) / in_this_lab(1)  # the share of a layer's activations that tensor parallelism leaves whole

STATED = [
    ("has {} million weights", f"{WEIGHTS / 1e6:.0f}"),
    ("takes {} bytes for each of them", f"{2 + 2 + 4 + 4 + 4}"),
    ("That is {} GB a layer", f"{16 * WEIGHTS / GB:.1f}"),
    ("{} layers fill a GPU of 80 GB", {5: "Five"}[int(80e9 // (16 * WEIGHTS))]),
    ("the model has {} layers", f"{LAYERS}"),
    ("{} = 1·5 + 2·7", f"{1 * 5 + 2 * 7}"),
    ("{} = 5 + 14", f"{Y[0][0]}"),
    ("19 = {}", " + ".join(map(str, PARTS))),
    ("rank 0 has the weight `[{}]` and returns", f"{[row[0] for row in FIRST.a]}"),
    ("returns the column {}", ", ".join(str(row[0]) for row in FIRST.y)),
    ("rank 0 has the weight `{}` and the x", f"{[[n] for n in ROW.a[0]]}"),
    ("and the x {}.", ", ".join(str(row[0]) for row in ROW.x)),
    ("takes 2·4 = {} bytes", f"{2 * 4}"),
    ("in place of {} with tensor parallelism", f"{elements(False, 'full'):.0f}"),
    ("made twice as well: {} in place", f"{elements(False, 'full') + 2:.0f}"),  # the sum behind fc2, once more
    ("in place of {} with both", f"{elements(True, 'full'):.0f}"),
    ("tensor parallelism, {} in place of 13", f"{elements(True, 'full') + 1:.0f}"),
    ("`s·b·h·({} + 5·a·s/h)`", f"{gpt3(1, False, heads=0):.0f}"),
    ("your function says {} a layer on one rank", gpt3_gb(1, False)),
    ("on each of eight ranks {} with tensor parallelism", gpt3_gb(8, False)),
    ("with tensor parallelism and {} with both", gpt3_gb(8, True)),
    ("keep {} of 114", f"{gpt3(8, False):.0f}"),
    ("keep 23 of {}", f"{gpt3(1, False):.0f}"),
    ("{} for what was divided by 8", f"{(gpt3(1, False) - 10) / 8:.0f}"),
    ("and {} that tensor parallelism cannot divide", f"{gpt3(10**9, False):.0f}"),
    ("Values 2 and 4 give {}", f"2 and {(2 + 4) // 2}"),
    ("with V = {}", f"{VOCAB}"),
    ("about what {} whole layers send", {2: "two"}[round(VOCAB / elements(False) / H)]),
    ("store all of them: {} GB for 8192 tokens", f"{4 * VOCAB * 8192 / GB:.1f}"),
    ("the loss is -ln(3/4) = {}", f"{-math.log(3 / 4):.4f}"),
    ("the gradient is 1/4 on rank 0 and 3/4 - 1 = {} on rank 1", "-1/4" if 3 / 4 - 1 == -1 / 4 else ""),
    ("rank 0 returns 10 + 30 = {}", f"{10 + 30}"),
    ("rank 1 returns {}", f"{20 + 40}"),
    (
        "{} tensors of `s·b·h` stay whole",
        {4: "four"}[round((in_this_lab(10**9) - 4 * 4 * 128 * 2) / (4 * 128 * 2 * 64))],
    ),
    ("it returns 1 + 10 = {} on rank 0", f"{1 + 10}"),
    ("= 11 on rank 0 and {} on rank 1", f"{2 + 20}"),
    ("a rank sends {}·s·b·h·(t-1)/t elements", f"{elements(True):.0f}"),
    ("elements instead of {}·s·b·h·(t-1)/t", f"{elements(False):.0f}"),
    ("It communicates {} times a layer", {4: "four"}[2 * 2]),
    ("{} rows with tp 1, 51,200 with tp 8", f"{-(-50257 // 128) * 128:,}"),
    ("50,304 rows with tp 1, {} with tp 8", f"{-(-50257 // 1024) * 1024:,}"),
    ("eight ranks spend {} seconds on messages", f"{16 * 7 * 400e12 / (72 * 2048 * 450e9):.2f}"),
    ("of the {} gradients of rank 0", f"{2 + 2 * 12 + 2}"),
    ("both send the same with {} tokens", f"{zero3_from(H) - 1:,}"),
    ("ZeRO-3 sends less from {} on", f"{zero3_from(H):,}"),
    ("For a GPT layer with h = {}, both send", f"{H}"),
    ("stay whole on every rank: {} percent", f"{100 * WHOLE:.1f}"),
    ("All else takes {} percent on one rank", f"{100 * (1 - WHOLE):.1f}"),
    ("a quarter of this, {} percent", f"{100 * (1 - WHOLE) / 4:.1f}"),
]


@pytest.mark.parametrize(("sentence", "number"), STATED, ids=[sentence for sentence, _ in STATED])
def test_the_lab_states(sentence: str, number: str) -> None:
    assert sentence.format(number) in TEXT


def test_both_send_the_same_one_token_before() -> None:
    tokens = zero3_from(H) - 1
    assert 3 * 12 * H**2 == 8 * tokens * H


def test_the_partial_gradients_of_the_lab_and_those_that_are_0() -> None:
    """23 names, of which the biases of k_layernorm, one a layer, have no gradient at all."""
    config = family_config(
        "gpt2", num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=256,
        qk_layernorm=True, max_position_embeddings=128,
    )  # fmt: skip
    with torch.device("meta"):
        names = [name for name, _ in GPTModel(config, Mesh.serial()).named_parameters()]
    partial = import_module("course.02_tensor_parallel.checks.replicated").partial_gradients(names, True)
    shift = [name for name in partial if name.endswith("k_layernorm.bias")]
    assert f"Your list has {len(partial)} names here, and {len(partial) - len(shift)} gradients were wrong" in TEXT
    assert len(shift) == 2


def test_a_bias_on_all_keys_has_no_gradient() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(q, k + bias, v, is_causal=True).square().sum().backward()
    assert bias.grad is not None and bias.grad.abs().max() < 1e-12


def test_the_packed_rows_of_the_table() -> None:
    """q0 q1 k0 v0 on rank 0 and q2 q3 k1 v1 on rank 1."""
    heads = import_module("course.02_tensor_parallel.checks.heads")
    table = [line for line in TEXT.split(" | ") if line]
    rows = [heads.qkv_part(**heads._rows(4, 2, 2, rank)).flatten().tolist() for rank in range(2)]
    named = [[f"{'qkv'[int(n) // 100]}{int(n) % 100}" for n in part] for part in rows]
    at = table.index("q0")
    assert [name.split(" |")[0] for name in table[at : at + 8]] == named[0] + named[1]


def test_the_matrices_of_the_problem() -> None:
    """The cell's own sum is the number in the text; the norms of a layer do not show at this precision."""
    config = family_config("llama", num_layers=1, hidden_size=H, num_attention_heads=64, num_query_groups=8,
                           ffn_hidden_size=FFN, vocab_size=256)  # fmt: skip
    with torch.device("meta"):
        layer = GPTModel(config, Mesh.serial()).decoder.layers["0"]
    assert sum(p.numel() for p in layer.parameters()) == pytest.approx(WEIGHTS, rel=1e-4)
    assert layout_of(layer.mlp.linear_fc1.weight).shape == (2 * FFN, H)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_rounding_of_a_row_layer_on_eight_ranks(seed: int) -> None:
    """About 2.4 times that of one rank if sums are bf16, √2 times if only the parts are."""
    assert "The sums make most of it." in TEXT and "the error is √2 of one rank's for every t" in TEXT
    g = torch.Generator().manual_seed(seed)
    x, w = (
        torch.randn(64, 4096, generator=g).bfloat16().float(),
        torch.randn(4096, 128, generator=g).bfloat16().float(),
    )

    def error(t: int, sums: torch.dtype) -> float:
        parts = [(a @ b).bfloat16() for a, b in zip(x.chunk(t, 1), w.chunk(t), strict=True)]
        total = parts[0].to(sums)
        for part in parts[1:]:
            total = total + part.to(sums)
        return (total.bfloat16().double() - x.double() @ w.double()).norm().item()

    one = error(1, torch.float32)
    assert error(8, torch.bfloat16) / one == pytest.approx(2.4, abs=0.15)
    for t in (4, 8, 32):
        assert error(t, torch.float32) / one == pytest.approx(math.sqrt(2), rel=0.05)
