import pytest

from course.figures.counts import against_ranks, boxes_filled
from minimegatron.errors import ConfigError
from tests.viz.reading import boxes, overlaps, words

FORMULAS = {"flat": lambda n: 2.0, "linear": lambda n: n - 1.0}


def test_as_many_boxes_as_are_needed_the_last_one_partly_full():
    figure = boxes_filled({"small": 20.0, "large": 200.0}, 80)
    assert [b.get_width() / 0.9 for b in boxes(figure)] == pytest.approx([0.25, 1, 1, 0.5])
    assert {"20 GB: 0.25 GPU", "200 GB: 2.5 GPUs", "one box: one GPU of 80 GB"} <= set(words(figure))
    assert not overlaps(figure)


def test_a_dashed_curve_for_each_formula_and_a_dot_for_each_count():
    figure = against_ranks(FORMULAS, {"linear": {8: 7.0, 4: 3.5}}, ranks=(2, 4, 8))
    lines = [line for line in figure.axes[0].lines if len(line.get_xdata())]
    curves = [line for line in lines if line.get_linestyle() == "--"]
    assert [list(line.get_ydata()) for line in curves] == [[2, 2, 2], [1, 3, 7]]
    dots = [line for line in lines if line not in curves]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in dots] == [([4, 8], [3.5, 7])]
    assert {"predicted", "counted, linear"} <= set(words(figure)) and not overlaps(figure)


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: boxes_filled({}, 80), "0 rows"),
    (lambda: boxes_filled({"a": 1}, 0), "boxes of 0"),
    (lambda: against_ranks(FORMULAS, {"log": {2: 1}}), "'log' was counted"),
    (lambda: against_ranks({}, {}), "no formula"),
])  # fmt: skip
def test_mistakes_are_named(draw, message):
    with pytest.raises(ConfigError, match=message):
        draw()
