"""More than one right answer, and answers of which only a part is asked; lists of names."""

from __future__ import annotations

import torch

from labkit.compare import ANYTHING, OneOf, difference


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
    assert difference(layer[:1], layer) == f"got 1 item, expected 3; missing: {layer[1]}, {layer[2]}"
    assert difference(layer, layer[:2]) == f"got 3 items, expected 2; not asked for: {layer[2]}"
    assert difference([layer[0], layer[2]], layer[:2]) == f"missing: {layer[1]}; not asked for: {layer[2]}"
    assert difference(layer[::-1], layer) is not None


def test_as_many_names_are_said_as_there_is_room_for():
    names = [f"layers.{i}.attention.linear_qkv.bias" for i in range(20)]
    said = difference([], names)
    assert said.startswith(f"got 0 items, expected 20; missing: {names[0]}, {names[1]}")
    assert said.endswith(" more") and len(said) < 250
