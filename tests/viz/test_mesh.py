import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.comm.mesh import grid_sizes, rank_groups
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError
from minimegatron.viz.mesh import _places, rank_grid
from tests.viz.reading import overlaps, words

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
