"""Every number that lab 13's text states, computed anew: a sentence that drifts from its number fails here."""

from __future__ import annotations

import dataclasses
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.config import TransformerConfig
from minimegatron.models.families import preset
from minimegatron.training.flops import forward_flops
from tests.course.marked import LABS

LAB = LABS["13_state_space"].lab
SOURCE = Path(str(import_module("course.13_state_space").__file__)).with_name("lab.py")
TEXT = " ".join(line.removeprefix("#").strip() for line in SOURCE.read_text().splitlines())
KEPT, STAGES, RANKS = (import_module(f"course.13_state_space.checks.{name}") for name in ("kept", "stages", "ranks"))
NEMOTRON = TransformerConfig.from_dict(preset("nemotron-h-8b"))
K = 1024


def example(exercise: str, case: int = 0, fixed: int | None = None) -> Any:
    """The right answer of a visible case."""
    chosen = LAB[exercise].cases[case]
    inputs = chosen.inputs if fixed is None else chosen.fixed[fixed]
    reference = LAB[exercise].reference
    assert reference is not None
    return reference(inputs) if isinstance(inputs, list) else reference(**inputs)


def flops(letter: str, s: int) -> float:
    counted = forward_flops(dataclasses.replace(NEMOTRON, hybrid_override_pattern=letter, num_layers=1), s)
    return (counted["attention"] + counted["mlp"]) / s


def listed(values: Any) -> list[float]:
    return [round(float(v), 4) for v in values]


BY_HAND = example("kept_bytes")
Y, LAST = example("recurrence")
CHUNKS, HANDED = example("chunked")
BEFORE = [float(h) for h in example("state_before")]
CUT = ["M-", "M*M*", "M-"]
CUTS = {"short": STAGES.loads(CUT, STAGES._SHORT), "long": STAGES.loads(CUT, STAGES._LONG)}

STATED = [
    ("together {}. After 11 tokens the cache has 176 bytes, after {} it is larger", BY_HAND["M"], BY_HAND["from"]),
    ('{{"*": {}, "M": {}, "model": {}, "from": {}}} in the example, for MM*- and 100 tokens', *BY_HAND.values()),
    ("h = {}, then 4/2 + 2 = {}, then 4/4 + 2 · 6 = {}.", *listed(Y.flatten())),
    ("1/2 + 1/2 + 12 = {}. Why", float(Y[-1])),
    ("so y = {}, {}. The state", *listed(CHUNKS.flatten())[:2]),
    ("6/4 + 12 = {}.", float(CHUNKS[-1])),
    ("{}, {}, 8/4 + 4 = {} and 6/2 + 6 = {}.", *BEFORE),
    ("Together they cost {}, so no", sum(CUTS["short"])),
    ("`M- | M*M* | M-` costs {}, {} and {}.", *CUTS["short"]),
    ("and this cut {}, {} and {}.", *CUTS["long"]),
    ("whose slowest stage costs {}.", STAGES.least("M-M*M*M-", STAGES._LONG, 3)),
    ("keeps {} heads of keys and values, {} channels each", NEMOTRON.num_query_groups, NEMOTRON.kv_channels),
    ("keeps {} heads, {} × {} numbers each, in fp32",
     NEMOTRON.mamba_num_heads, NEMOTRON.mamba_head_dim, NEMOTRON.mamba_state_dim),
    ("adds 0.001 · (1 - 0.25)",),
]  # fmt: skip


@pytest.mark.parametrize(("text", "values"), [(text, values) for text, *values in STATED])
def test_a_stated_number_is_the_computed_one(text: str, values: list[float]) -> None:
    whole = [int(v) if isinstance(v, float) and v == int(v) else v for v in values]
    assert text.format(*whole) in re.sub(r"\s+", " ", TEXT)


def test_what_is_said_of_nemotron_h() -> None:
    thousand, million = ({letter: flops(letter, s) for letter in "M*-"} for s in (K, K * K))
    assert min(thousand, key=thousand.get) == "*" and 38 < million["*"] / million["M"] < 40  # "nearly forty times"
    assert abs(million["M"] / thousand["M"] - 1) < 0.01  # "which does not change"
    kept = {s: KEPT.kept_bytes("M", s, KEPT._NEMOTRON) for s in (K, K * K)}
    assert 0.95 < kept[K]["*"] / kept[K]["M"] < 1 and 1000 < kept[K * K]["*"] / kept[K]["M"] < 1050


def test_a_state_in_bf16_stands_still_at_a_quarter() -> None:
    assert "At 0.25 the numbers of bf16 are 0.002 apart" in TEXT
    quarter = torch.tensor(0.25, dtype=torch.bfloat16)
    apart = (torch.nextafter(quarter, quarter + 1) - quarter).item()
    assert round(apart, 3) == 0.002 and 0.001 * (1 - 0.25) < apart / 2


def test_strong_decays_overflow_in_fp32() -> None:
    assert "e^150 overflows in fp32" in TEXT and torch.tensor(150.0).exp().isinf()
