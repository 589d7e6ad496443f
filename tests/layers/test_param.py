"""Layouts of parameters, and the same model from the same seed in every layout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.layers import logical as noise
from minimegatron.layers.logical import draw, draw_part, gather_logical, initialize, load_logical
from minimegatron.layers.param import Init, ParamLayout, cut_evenly, layout_of, logical_parameters
from minimegatron.models.decoder import GPTModel, build_model
from minimegatron.models.families import family_config

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50, "max_position_embeddings": 16}


def config(family="llama", **more):
    return family_config(family, **{**SIZES, "make_vocab_size_divisible_by": 8, **more})


@given(tp=st.integers(1, 4), blocks=st.integers(1, 3), rows=st.integers(1, 3), dim=st.integers(0, 1))
def test_parts_join_to_the_whole(tp, blocks, rows, dim):
    length = tp * blocks * rows
    shape = (length, 3) if dim == 0 else (3, length)
    full = torch.arange(3.0 * length).view(shape)
    axes = [Axis("tp", tuple(range(tp)), r) for r in range(tp)]
    layouts = [ParamLayout(shape, dim, cut_evenly(length, a, "x", blocks), a.rank) for a in axes]
    parts = [layout.take(full) for layout in layouts]
    assert all(part.shape == layout.local_shape for part, layout in zip(parts, layouts, strict=True))
    assert torch.equal(layouts[0].join(parts), full)


def test_gate_and_up_are_cut_separately():
    parts = cut_evenly(8, Axis("tp", (0, 1), 0), "fc1", blocks=2)
    assert parts == (((0, 2), (4, 6)), ((2, 4), (6, 8)))


def test_what_cannot_be_cut_evenly_is_refused():
    with pytest.raises(ConfigError, match="cannot be cut into 2"):
        cut_evenly(9, Axis("tp", (0, 1), 0), "fc1")


def logical_weights(rank: int, world: int, family: str, sp: bool) -> dict[str, torch.Tensor]:
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=sp))
    model = build_model(config(family), mesh, seed=7)
    return {n: gather_logical(p, layout_of(p), mesh.tp) for n, p in logical_parameters(model)}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("tp,sp", [(2, False), (4, True)])
def test_the_same_seed_is_the_same_model_in_every_layout(ranks, family, tp, sp):
    want = logical_weights(0, 1, family, False)
    for got in ranks(tp).run(logical_weights, family, sp):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[n], want[n]) for n in want)


def test_stages_hold_the_layers_of_the_whole_model():
    whole = dict(logical_parameters(build_model(config(), Mesh.serial(), 3)))
    stages = [
        GPTModel(config(), Mesh.serial(), pre_process=True, post_process=False, layer_numbers=[0]),
        GPTModel(config(), Mesh.serial(), pre_process=False, post_process=True, layer_numbers=[1]),
    ]
    names = []
    for stage in stages:
        initialize(stage, 3)
        for name, param in logical_parameters(stage):
            assert torch.equal(param, whole[name])
            names.append(name)
    assert sorted(names) == sorted(whole)


def test_seeds_differ_and_layers_differ_and_the_law_is_kept():
    a, b = (dict(logical_parameters(build_model(config(hidden_size=128), Mesh.serial(), s))) for s in (1, 2))
    fc1, proj = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.self_attention.linear_proj.weight"
    assert not torch.equal(a[fc1], b[fc1])
    assert not torch.equal(a[fc1], a[fc1.replace("layers.0", "layers.1")])
    assert abs(a[fc1].std().item() - 0.02) < 0.0005
    assert abs(a[proj].std().item() - 0.02 / 2) < 0.0005
    assert a["decoder.final_layernorm.weight"].eq(1).all()


def test_padding_rows_are_zero_and_never_gathered():
    model = build_model(config(), Mesh.serial(), 0)
    table = model.embedding.word_embeddings.weight
    assert table.shape[0] == 56 and not table[50:].any() and table[49].any()
    assert gather_logical(table, layout_of(table), Mesh.serial().tp).shape[0] == 50


def test_loading_lists_every_problem_at_once():
    model = build_model(config(), Mesh.serial(), 0)
    tensors = {n: gather_logical(p, layout_of(p), Mesh.serial().tp) for n, p in logical_parameters(model)}
    load_logical(model, tensors)
    del tensors["decoder.final_layernorm.weight"]
    tensors["decoder.layers.0.mlp.linear_fc2.weight"] = torch.zeros(3, 3)
    tensors["extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as error:
        load_logical(model, tensors)
    for word in ("missing decoder.final_layernorm.weight", "unexpected extra", "(3, 3)"):
        assert word in str(error.value)


# ------------------------------------------------------------------------------------------------------- large matrices

BIG = (1500, 3000)  # more than WHOLE, and a multiple of no tile


def layouts(shape: tuple[int, int], dim: int, size: int, blocks: int = 1, rows: int | None = None) -> list[ParamLayout]:
    parts = cut_evenly(shape[dim], Axis("tp", tuple(range(size)), 0), "x", blocks)
    return [ParamLayout(shape, dim, parts, rank, Init(std=0.5), rows=rows) for rank in range(size)]


@pytest.mark.parametrize(
    "dim, size, blocks, rows", [(0, 3, 1, None), (0, 3, 2, None), (1, 4, 1, None), (0, 4, 1, 1400), (0, 5, 1, 1100)]
)
def test_parts_are_those_of_the_whole(dim, size, blocks, rows):
    cut = layouts(BIG, dim, size, blocks, rows)
    whole = draw("w", cut[0], 3)
    assert whole.shape == BIG and whole[: rows or BIG[0]].all(1).all() and not whole[rows or BIG[0] :].any()
    for layout in cut:
        assert torch.equal(draw_part("w", layout, 3), layout.take(whole))


def test_experts_are_cut_and_drawn_alone():
    one = layouts(BIG, 1, 4)[2]
    stack = dataclasses.replace(one, shape=(8, *BIG), dim=2, experts=(5, 6))
    assert torch.equal(draw_part("w", stack, 3)[0], draw_part("w.5", one, 3))


def test_a_part_costs_what_it_holds(monkeypatch):
    made, real = [], np.random.SFC64
    monkeypatch.setattr(np.random, "SFC64", lambda seed: made.append(seed) or real(seed))
    shape = (8192, 2048)
    for dim in (0, 1):
        layout = layouts(shape, dim, 8)[1]
        made.clear()
        draw_part("w", layout, 3)
        assert len(made) == shape[0] * shape[1] / 8 / noise.TILE**2


def test_the_law():
    """Mean, variance, skewness, kurtosis and tails of four million numbers, each within five standard errors."""
    x = noise.tiles("w", 1, (2048, 2048), ((0, 2048),), ((0, 2048),)).double().flatten()
    n = x.numel()
    for power, want, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean().item() - want) < 5 * (variance / n) ** 0.5
    for bound in (1.0, 2.0, 3.0, 4.0):
        p = 1 - torch.erf(torch.tensor(bound / 2**0.5, dtype=torch.float64)).item()
        assert abs((x.abs() > bound).double().mean().item() - p) < 5 * (p * (1 - p) / n) ** 0.5


def test_no_tile_is_like_another():
    """Neighbours, other names and other seeds: no number twice in its place, no correlation beyond chance."""
    size = (noise.TILE, noise.TILE)
    whole = noise.tiles("w", 1, (1024, 1024), ((0, 1024),), ((0, 1024),))
    tiles = [part for row in whole.split(noise.TILE) for part in row.split(noise.TILE, 1)]
    others = (("v", 1), ("w", 2), ("w.0", 1))
    tiles += [noise.tiles(name, seed, (1024, 1024), ((0, 256),), ((0, 256),)) for name, seed in others]
    flat = torch.stack([tile.reshape(-1) for tile in tiles]).double()
    assert tiles[0].shape == size
    found = (flat @ flat.t() / flat.shape[1]).fill_diagonal_(0.0).abs().max().item()
    assert found < 6 / flat.shape[1] ** 0.5
    heads = [tuple(row[:4].tolist()) for row in flat]
    assert len(set(heads)) == len(heads)


@pytest.mark.parametrize("shape", [(8, 8), BIG], ids=str)
def test_the_name_and_the_seed_are_in_every_number(shape):
    layout = ParamLayout(shape, init=Init(std=1.0))
    a, b, c = draw("a", layout, 1), draw("b", layout, 1), draw("a", layout, 2)
    assert (a == b).float().mean() < 1e-4 and (a == c).float().mean() < 1e-4


def test_small_ones_are_one_stream():
    """Labs and stored traces were made with these numbers."""
    want = [[-0.6743953, -2.5288968, -0.9779837], [1.6014683, 0.4407022, 0.6538467]]
    torch.testing.assert_close(draw("w", ParamLayout((2, 3), init=Init(std=1.0)), 1), torch.tensor(want))
    assert not noise.is_tiled((2048, 2048)) and noise.is_tiled((2048, 2049)) and not noise.is_tiled((1 << 23,))
