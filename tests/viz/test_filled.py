import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.filled import boxes_filled
from tests.viz.reading import boxes, overlaps, words


def test_as_many_boxes_as_are_needed_the_last_one_partly_full():
    figure = boxes_filled({"small": 20.0, "large": 200.0}, 80)
    assert [b.get_width() / 0.9 for b in boxes(figure)] == pytest.approx([0.25, 1, 1, 0.5])
    frames = [p for p in figure.axes[0].patches if not p.get_fill()]
    assert [(f.get_x(), f.get_y()) for f in frames] == [(0, 0), (0, 1.5), (1, 1.5), (2, 1.5)]
    assert {"20 GB: 0.25 GPU", "200 GB: 2.5 GPUs", "one box: one GPU of 80 GB"} <= set(words(figure))
    assert not overlaps(figure)


def test_nothing_to_draw_is_refused():
    with pytest.raises(ConfigError, match="0 rows"):
        boxes_filled({}, 80)
    with pytest.raises(ConfigError, match="boxes of 0"):
        boxes_filled({"a": 1}, 0)
