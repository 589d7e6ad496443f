import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.figures.tensor_parallel import Shards, weight_shards
from minimegatron.comm.mesh import Axis, grid_sizes, rank_groups
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError
from minimegatron.layers.param import cut_evenly
from minimegatron.viz.mesh import _places, rank_grid
from tests.viz.reading import boxes, overlaps, words

PARALLEL = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2, pipeline_model_parallel_size=2)
SIZES = grid_sizes(PARALLEL, 16)


def test_every_rank_is_shown_once_with_its_coordinates():
    figure = rank_grid(SIZES, mark=5)
    seen = words(figure)
    assert sorted(int(w) for w in seen if w.isdigit()) == list(range(16))
    assert seen.count("tp 1\ncp 0\ndp 1\npp 0") == 1, "rank 5 = tp + 2 cp + 4 dp + 8 pp"
    assert "16 ranks = tp 2 x cp 2 x dp 2 x pp 2" in seen
    assert not overlaps(figure)


def test_members_of_a_group_share_colour_and_letter():
    groups = {name: rank_groups(PARALLEL, 16, name) for name in ("tp", "dp", "dp-cp")}
    figure = rank_grid(SIZES, groups)
    assert not overlaps(figure)
    for axes, (name, members) in zip(figure.axes, groups.items(), strict=False):
        assert axes.get_title(loc="left").startswith(f"{name}: {len(members)} groups of {len(members[0])}")
        colours = [p.get_facecolor() for p in axes.patches][:16]
        letters = [t.get_text() for t in axes.texts if re.fullmatch("[A-Z]", t.get_text())]
        for group in members:
            assert len({(colours[r], letters[r]) for r in group}) == 1
        assert len(set(letters)) == len(set(colours)) == len(members)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_no_two_ranks_share_a_place(sizes):
    places, (width, height) = _places(dict(zip("abcd", sizes, strict=False)))
    assert len(set(places)) == len(places)
    assert all(0 <= x <= width - 1 + 1e-9 and 0 <= y <= height - 1 + 1e-9 for x, y in places)
    for i, (x, y) in enumerate(places):
        assert all(max(abs(x - u), abs(y - v)) > 1 - 1e-9 for u, v in places[:i]), "cells overlap"


def test_a_grid_that_cannot_be_drawn_is_refused():
    with pytest.raises(ConfigError, match="5 axes"):
        rank_grid(dict.fromkeys("abcde", 2))
    with pytest.raises(ConfigError, match="rank 4; the grid has 4"):
        rank_grid({"tp": 4}, {"tp": [[0, 1], [2, 4]]})


def test_shards_tile_the_weight_in_proportion_and_name_their_ranges():
    tp = Axis("tp", (0, 1), 0)
    parts = cut_evenly(32, tp, "fc1", blocks=2)
    figure = weight_shards(
        [
            Shards("fc1 [gate; up]", (32, 8), 0, parts, ("gate", "up")),
            Shards("norm", (8,)),
            Shards("fc2", (8, 16), 1, cut_evenly(16, tp, "fc2")),
        ]
    )
    assert not overlaps(figure)
    first = figure.axes[0]
    assert [t.get_text() for t in first.texts if "rank" in t.get_text()] == [
        "rank 0\n[0:8]", "rank 0\n[16:24]", "rank 1\n[8:16]", "rank 1\n[24:32]",
    ]  # fmt: skip
    tops = sorted((p.get_y(), p.get_height()) for p in first.patches)
    assert all(abs(y - i / 4) < 1e-9 and abs(h - 0.25) < 1e-9 for i, (y, h) in enumerate(tops))
    assert "every rank holds all" in words(figure)
    assert [t.get_position()[1] for t in first.texts if t.get_text() in ("gate", "up")] == [0.25, 0.75]
    [norm] = figure.axes[1].patches
    assert norm.get_width() < 0.2 * norm.get_height()  # a vector
    assert sum(p.get_width() for p in figure.axes[2].patches) == pytest.approx(1.0)
    assert len(boxes(figure)) == 4 + 1 + 2
    with pytest.raises(ConfigError, match="3 dims"):
        weight_shards([Shards("x", (2, 2, 2))])
    with pytest.raises(ConfigError, match="no weights"):
        weight_shards([])
