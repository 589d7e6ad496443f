import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.messages import Message, strips
from tests.viz.reading import boxes, overlaps, words

REDUCE = [Message("all_reduce", 2048), Message("all_reduce", 2048, True)]
HALVES = [Message("all_gather", 1024), Message("reduce_scatter", 1024), Message("all_gather", 1024, True)]


def test_a_box_is_as_wide_as_its_bytes_and_follows_the_one_before():
    figure = strips({"tp": REDUCE, "tp and sp": HALVES})
    assert [(b.get_x(), b.get_width()) for b in boxes(figure)] == [(0, 2), (0, 2), (0, 1), (1, 1), (0, 1)]


def test_forward_stands_above_backward():
    forward, backward = boxes(strips({"tp": REDUCE}))
    assert forward.get_y() < backward.get_y()


def test_the_kinds_differ_by_tint_and_the_sums_stand_beside():
    figure = strips({"tp": REDUCE, "tp and sp": HALVES}, {"tp": 4096, "tp and sp": 5120}, title="one layer")
    assert len({b.get_facecolor() for b in boxes(figure)}) == 3
    assert {"4 KiB sent\n4 KiB predicted", "3 KiB sent\n5 KiB predicted", "all-reduce"} <= set(words(figure))
    assert not overlaps(figure)


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="no message"):
        strips({"tp": []})
    with pytest.raises(ConfigError, match="broadcast"):
        strips({"tp": [Message("broadcast", 1)]})


def test_what_is_gathered_again_is_dashed_and_in_the_legend():
    figure = strips({"sp": [Message("all_gather", 1024, True), Message("all_gather", 1024, True, again=True)]})
    assert [b.get_linestyle() for b in boxes(figure)] == ["-", "--"]
    assert "x gathered again, for dW" in words(figure)
