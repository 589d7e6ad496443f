"""Large matrices are drawn in tiles: the same in every cut, normal, and unlike any other."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from minimegatron.comm.mesh import Axis
from minimegatron.layers import logical as noise
from minimegatron.layers.logical import draw, draw_part
from minimegatron.layers.param import Init, ParamLayout, cut_evenly

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
