"""Every number that lab 04's text states, computed anew: a sentence that drifts from its number fails here."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path

import pytest
import torch

from course.figures.context_parallel import FULL, PART, pairs_of, quarters, steps_of
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

CHECKS = import_module("course.04_context_parallel.checks.predicted")
SOURCE = Path(CHECKS.__file__).parents[1] / "lab.py"
TEXT = " ".join(line.removeprefix("#").strip() for line in SOURCE.read_text().splitlines())

S, H, LAYERS, GPU = 128 * 1024, 4096, 32, 80e9
KEPT, INPUTS, ONE_LAYER = 34 * S * H * LAYERS, 2 * S * H * LAYERS, 34 * S * H
ATTENTION, WEIGHTS = 6 * S**2 * H * LAYERS, 6 * 8.03e9 * S  # forward and backward, causal; Llama-3 8B has 8.03e9
LINK = {"s": S, "cp": 8, "tp": 1, "heads": 32, "groups": 8, "element_size": 2, "flops": 989e12}


def ratio(held: list[list[int]], window: int = 0) -> float:
    """Work of the slowest rank over the mean; with a window a token sees at most so many keys."""
    work = [sum(min(i + 1, window or i + 1) for i in places) for places in held]
    return len(work) * max(work) / sum(work)


def cut(s: int, cp: int, zigzag: bool) -> list[list[int]]:
    return [CHECKS.positions(s, cp, r, zigzag).tolist() for r in range(cp)]


def computed_quarters(held: list[list[int]]) -> int:
    """Of the last rank, one on the diagonal counted whole."""
    steps = [quarters(held, len(held) - 1, step) for step in range(len(held))]
    return sum(part in (FULL, PART) for step in steps for row in step for part in row)


def ring_of_four_documents(cp: int, s: int) -> float:
    """Means that a ring with the zigzag cut takes: chunk c has c % (chunks of a document) whole chunks before it."""
    chunks, each = 2 * cp, 2 * cp // 4
    n = s // chunks

    def pairs(q: int, k: int) -> float:
        return 0 if q // each != k // each or k > q else n * (n + 1) / 2 if k == q else n * n

    def work(r: int, owner: int) -> float:
        return sum(pairs(q, k) for q in (r, chunks - 1 - r) for k in (owner, chunks - 1 - owner))

    table = [[work(r, (r - step) % cp) for r in range(cp)] for step in range(cp)]
    return cp * sum(map(max, table)) / sum(map(sum, table))


def tokens(bandwidth: float) -> float:
    return float(CHECKS.answers(**LINK, bandwidth=bandwidth)["tokens_to_hide"])


CONTIGUOUS, ZIGZAG = cut(16, 4, False), cut(16, 4, True)
LAST, BEFORE = pairs_of(CONTIGUOUS)[-1], pairs_of(CONTIGUOUS)[0]
END = steps_of([2, 1, 8, 4], [3, 6, 1, 2], 2)
RING = CHECKS.bytes_per_layer(S, 1, 32, 8, 128, 8, 2)["ring"]
V, DOUT = torch.tensor([2.0, 4.0, 9.0, 1.0]), 8.0

NUMBERS = [
    ("instead of {:.0f} GB", KEPT / 1e9),
    ("for each of p sequences: {:.0f} GB again", KEPT / 1e9),
    ("That is {:.1f} GB instead", INPUTS / 1e9),
    ("plus {:.1f} GB for the one layer", ONE_LAYER / 1e9),
    ("it cuts to an eighth: {:.0f} GB", KEPT / 8 / 1e9),
    ("it is {:.0f} % of all arithmetic", 100 * ATTENTION / (ATTENTION + WEIGHTS)),
    ("is {:.1f}·10¹⁶ operations", (ATTENTION + WEIGHTS) / 1e16),
    ("with recompute {:.1f}·10¹⁶", (ATTENTION + WEIGHTS) * 4 / 3 / 1e16),
    ("{:.0f} seconds on a GPU that reaches 400 TFLOP/s", (ATTENTION + WEIGHTS) * 4 / 3 / 400e12),
    ("has {:.1f} times the work of the", LAST / BEFORE),
    ("rank 0 has 1 + 2 + 3 + 4 = {} pairs", pairs_of(cut(8, 2, False))[0]),
    ("pairs, rank 1 has {}.", pairs_of(cut(8, 2, False))[1]),
    ("rank 0 has 1 + 2 + 7 + 8 = {}, and rank 1 has as many", *set(pairs_of(cut(8, 2, True)))),
    ("The ring sends {} bytes, Ulysses {:.0f}.", *CHECKS.bytes_per_layer(4, 1, 4, 2, 1, 2, 1).values()),
    ("all keys and values once, {:.0f} MiB here", RING * 8 / 7 / 2**20),
    ("e^(ln 2 - ln 8) = {} before", END[1].shrink),
    ("(2 + 1 + 8 + 4) = {}.", END[-1].out / END[-1].total),
    ("here ln {}.", END[-1].top * END[-1].total),
    ("the new out 2/8·4 + 6/8·8 = {:.0f}.", 2 / 8 * 4 + 6 / 8 * 8),
    ("Near ln 1024 = {:.1f} the numbers", math.log(1024)),
    ("of bf16 are 1/{:.0f} apart", 1 / (torch.finfo(torch.bfloat16).eps * 4)),
    ("off by up to 1/{:.0f}, and", 2 / (torch.finfo(torch.bfloat16).eps * 4)),
    ("by {:.1f} percent. Rounding", 100 / 64),
    ("is off by {:.1f} percent at most", 100 * torch.finfo(torch.bfloat16).eps / 2),
    ("ranks has {:.2f} times the mean", ratio(cut(4096, 4, False))),
    ("each of three others, 3 + 4·3 = {}. A", computed_quarters(CONTIGUOUS)),
    ("and 2 of each other, 3 + 2·3 = {}. The", computed_quarters(ZIGZAG)),
    (
        "has most: {} to {}, {:.2f}, on every",
        computed_quarters(CONTIGUOUS),
        computed_quarters(ZIGZAG),
        computed_quarters(CONTIGUOUS) / computed_quarters(ZIGZAG),
    ),
    ("so out = {:.0f}, and dout = 8", V.mean().item()),
    ("Then dP = {}, {}, {}, {}, and", *(DOUT * V).int().tolist()),
    ("their mean is {:.0f}. A", DOUT * V.mean().item()),
    ("dV is {:.0f} for every key", DOUT / 4),
    ("by √d is {:.0f}, {:.0f}, {:.0f}, {:.0f}. Its", *((DOUT * V - DOUT * V.mean()) / 4).tolist()),
    ("the ring still takes {:.2f} means", ring_of_four_documents(8, 4096)),
    ("2,048 tokens is cut into slices of {:.0f},", 2048 / (2 * 16)),
    ("tp {}, cp {}, pp {} and dp {} on {:,} GPUs", 8, 16, 16, 8, 8 * 16 * 16 * 8),
    ("the slowest rank has {:.3f} times the mean, with either cut", ratio(cut(1024, 8, True), 128)),
    ("with those of K and V {} blocks for {} on four ranks, twice", 2 * (4 - 1), 4 - 1),
    ("With C hops it is {} blocks, {:.2f} times.", 4 - 1 + 4, (4 - 1 + 4) / 3),
    ("on 8 ranks are {:,} tokens", S // 8),
    ("16 ranks, with {:,} tokens", S // 16),
    ("about {:,.0f} tokens are enough", round(tokens(450e9), -2)),
]


@pytest.mark.parametrize(("text", "values"), [(text, values) for text, *values in NUMBERS])
def test_a_stated_number_is_the_computed_one(text: str, values: list[float]) -> None:
    whole = [int(v) if isinstance(v, float) and v == int(v) else v for v in values]
    assert text.format(*whole) in TEXT


def test_both_cuts_are_alike_under_a_window() -> None:
    assert ratio(cut(1024, 8, True), 128) == ratio(cut(1024, 8, False), 128)


def test_a_ring_hides_on_8_ranks_at_50_gb_and_not_on_16() -> None:
    assert round(tokens(50e9)) == 9890 and round(tokens(450e9)) == 1099
    assert S // 16 < tokens(50e9) < S // 8


def test_the_seventh_of_a_long_contiguous_cut() -> None:
    assert "(seven times, when the sequence is long)" in TEXT
    long = pairs_of(cut(4096, 4, False))
    assert round(long[-1] / long[0], 1) == 7.0


def test_a_score_of_89_overflows_float32() -> None:
    assert "overflows for a score of 89 in float32" in TEXT
    assert torch.tensor(89.0).exp().isinf() and torch.tensor(88.0).exp().isfinite()


def test_a_llama_layer_keeps_55_where_a_gpt_layer_keeps_34() -> None:
    assert "keeps 55·s·b·h" in TEXT
    s, h = 128, 256
    config = family_config("llama", num_layers=1, hidden_size=h, num_attention_heads=8, num_query_groups=2,
                           ffn_hidden_size=h * 7 // 2, vocab_size=256, params_dtype="bf16",
                           kernels="torch")  # fmt: skip
    layer = build_model(config, Mesh.serial(), 1).decoder.layers["0"].to(torch.bfloat16)
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(s, 1, h, dtype=torch.bfloat16, requires_grad=True), AttentionContext())
    nbytes = sum(storage.nbytes() for at, storage in kept.items() if at not in parameters)
    assert round(nbytes / s / h) == 55


@pytest.mark.parametrize("seed", [0, 1])
def test_an_lse_in_bf16_costs_about_eight_roundings_on_16_ranks(seed: int) -> None:
    attention, pieces = (import_module(f"course.04_context_parallel.checks.{part}") for part in ("attention", "pieces"))
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, n, 32, generator=g) for n in (128, 1024, 1024))
    at, last = torch.arange(1024), torch.full((128,), 1024)
    exact, _ = attention.dense(q.double(), k.double(), v.double(), last, at)

    def error(kept: torch.dtype) -> float:
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
        for some in at.chunk(16):
            more = attention.dense(q, k[:, some], v[:, some], last, some)
            out, lse = pieces.merge(out, lse.to(kept).float(), *more)
        return float((out.bfloat16().double() - exact).norm())

    assert 7 < error(torch.bfloat16) / error(torch.float32) < 9.5
