import numpy as np
import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.heat import shards
from tests.viz.reading import overlaps, words

PART = [[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]]


def test_shards_stand_below_each_other_on_one_scale():
    figure = shards({"equal": [PART, PART], "other": [PART, [[0.0] * 3] * 2]}, title="fc1")
    equal, other = (axes.images[0] for axes in figure.axes)
    assert np.array_equal(np.asarray(equal.get_array()), np.array(PART + PART))
    assert equal.get_clim() == other.get_clim() == (-3.0, 3.0)


def test_ranks_are_named_and_kept_apart_by_a_line():
    figure = shards({"equal": [PART, PART]})
    assert [w for w in words(figure) if w.startswith("rank")] == ["rank 0", "rank 1"]
    assert {tuple(line.get_ydata()) for line in figure.axes[0].lines} == {(1.5, 1.5)}
    assert not overlaps(figure)


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="no matrix"):
        shards({"empty": []})
    with pytest.raises(ConfigError, match="differ in length"):
        shards({"torn": [PART, [[1.0]]]})
