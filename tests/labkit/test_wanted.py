"""More than one right answer, and answers of which only a part is asked; lists of names; which part is wrong."""

from __future__ import annotations

import torch

from labkit.compare import difference
from labkit.deciding import _part
from labkit.wanted import ANYTHING, OneOf


def test_one_of_several_values_is_right():
    want = {"tokens": OneOf(36864.0, 36865)}
    assert difference({"tokens": 36864}, want) is None
    assert difference({"tokens": 36865}, want) is None
    assert difference({"tokens": 36866}, want) == "tokens: got 36866, expected 36864.0"
    assert difference({"tokens": None}, want) is not None


def test_a_part_may_be_anything_and_the_others_not():
    want = {"loss": torch.ones(3), "dz": ANYTHING}
    assert difference({"loss": torch.ones(3), "dz": None}, want) is None
    assert difference({"loss": torch.zeros(3), "dz": None}, want) is not None
    assert difference({"loss": torch.ones(3)}, want) is not None


def test_of_a_list_of_names_it_is_said_which_are_missing_or_too_many():
    layer = [f"layers.0.attention.{name}" for name in ("q_layernorm.weight", "linear_proj.bias", "linear_qkv.bias")]
    assert difference(layer[:1], layer) == f"missing: {layer[1]} and 1 more"
    assert difference(layer, layer[:2]) == f"not asked for: {layer[2]}"
    assert difference([layer[0], layer[2]], layer[:2]) == f"missing: {layer[1]}; not asked for: {layer[2]}"
    assert difference(layer[::-1], layer) is not None


def test_the_part_that_is_wrong_is_named():
    want = {"dx": torch.ones(9), "dw": torch.ones(9)}
    phrase = difference({"dx": torch.ones(9), "dw": torch.zeros(9)}, want)
    assert phrase and _part(phrase, want) == "dw"
    assert _part("got None, expected a tensor [9]", torch.ones(9)) == ""
