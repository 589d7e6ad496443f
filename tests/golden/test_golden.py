"""The frozen numbers are intact, complete, and can be rebuilt from their recipes."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from minimegatron.comm.mesh import check_grids_agree, rank_groups
from minimegatron.config import OptimizerConfig, ParallelConfig, TransformerConfig
from minimegatron.errors import ConfigError
from tests import golden
from tests.golden import megatron_names
from tests.oracle.groups import digest

GPT = golden.load("gpt")
LAYOUTS = golden.load("groups")["layouts"]
FIRST_TWO = ["-0x1.0fc6cc0000000p-4", "-0x1.5f3c660000000p-4"]
BATCHES = "dddf453a19e93041"  # start of the sha256 of the int64 little-endian bytes


@pytest.mark.parametrize("entry", LAYOUTS, ids=lambda e: "-".join(str(v) for v in e["layout"].values()))
def test_rank_groups_are_megatrons(entry: dict[str, Any]) -> None:
    sizes = dict(entry["layout"])
    world = sizes.pop("world_size")
    parallel = ParallelConfig(**sizes)
    for grid, tokens in entry["sha256"].items():
        for token, frozen in tokens.items():
            ours = rank_groups(parallel, world, token, grid)
            if "groups" in entry:
                assert ours == entry["groups"][grid][token], f"{grid} {token}"
            assert digest(ours) == frozen, f"{grid} {token}"
    if entry["refused"]:
        with pytest.raises(ConfigError):
            check_grids_agree(parallel, world)
    else:
        check_grids_agree(parallel, world)


def test_the_table_has_layouts_of_every_kind() -> None:
    assert len(LAYOUTS) >= 40
    assert any(e["refused"] for e in LAYOUTS)
    assert max(e["layout"]["world_size"] for e in LAYOUTS) == 4096
    assert len({e["layout"]["order"] for e in LAYOUTS}) >= 8


def test_seeded_weights_have_not_moved() -> None:
    weight = megatron_names.seeded_weight("decoder.layers.0.mlp.linear_fc1.weight", (64, 32))
    assert weight.dtype == torch.float32
    assert [float.hex(v) for v in weight[0, :2].tolist()] == FIRST_TWO
    assert 0.045 < weight.std().item() < 0.055
    norm = megatron_names.seeded_weight("decoder.final_layernorm.weight", (32,))
    assert abs(norm.mean().item() - 1) < 0.05
    assert abs(megatron_names.seeded_weight("decoder.final_layernorm.bias", (32,)).mean().item()) < 0.05


def test_seeded_batches_have_not_moved() -> None:
    batches = megatron_names.seeded_batches(GPT["data"])
    assert batches.shape == (8, 2, 17)
    assert hashlib.sha256(batches.numpy().astype("<i8").tobytes()).hexdigest()[:16] == BATCHES


@pytest.mark.parametrize("name", GPT["models"])
def test_traces_are_complete_and_agree_across_layouts(name: str) -> None:
    entry = GPT["models"][name]
    assert len(entry["trace"]) == 10
    assert all(strays <= 1e-5 for strays in entry["layouts"].values())
    assert len(entry["layouts"]) == 6
    shapes = megatron_names.parameter_shapes(entry["model"])
    assert shapes.keys() == entry["first_grad_norms"].keys() == entry["last_param_norms"].keys()
    # The whole is the root of the sum of the squares of its parts.
    parts = sum(v**2 for v in entry["first_grad_norms"].values()) ** 0.5
    assert parts == pytest.approx(entry["trace"][0][1], rel=1e-6)


@pytest.mark.parametrize("name", GPT["models"])
def test_the_frozen_settings_are_fields_of_our_configs(name: str) -> None:
    model = TransformerConfig.from_dict(GPT["models"][name]["model"])
    assert model.padded_vocab_size(4) == model.vocab_size
    assert OptimizerConfig.from_dict(GPT["optimizer"]).lr == 3e-3
