"""Drawings of lab 09."""

import pytest

from course.figures.training import law_of_sizes, panels_of_bars
from minimegatron.errors import ConfigError

LAW = {"E": 2.0, "A": 8.0, "alpha": 0.5}


def test_the_law_its_models_and_the_predicted_one_are_there():
    [axes] = law_of_sizes([(16, 4.0), (64, 3.0)], (256, 2.5), LAW, floor=1.9).axes
    curve, models, hit, *floors = axes.lines
    assert list(curve.get_ydata()) == [2.0 + 8.0 * n**-0.5 for n in curve.get_xdata()]
    assert (list(models.get_xdata()), list(models.get_ydata())) == ([16, 64], [4.0, 3.0])
    assert (list(hit.get_xdata()), [float(line.get_ydata()[0]) for line in floors]) == ([256], [2.0, 1.9])


def test_single_runs_and_what_others_predict_stand_beside_it():
    runs, others = [(16, 4.1), (16, 3.9)], {"a line": 1.5, "the last": 3.0}
    [axes] = law_of_sizes([(16, 4.0)], (256, 2.5), LAW, floor=1.9, runs=runs, others=others).axes
    drawn = {line.get_label(): [*zip(line.get_xdata(), line.get_ydata(), strict=True)] for line in axes.lines}
    assert (drawn["single runs"], drawn["a line"], drawn["the last"]) == (runs, [(256, 1.5)], [(256, 3.0)])


def test_each_quantity_has_a_scale_of_its_own():
    figure = panels_of_bars({"a": [1.0, 2.0], "b": [100.0, 50.0]}, ["x", "y"])
    assert [[bar.get_width() for bar in axes.patches] for axes in figure.axes] == [[1.0, 2.0], [100.0, 50.0]]
    assert figure.axes[0].get_xlim() != figure.axes[1].get_xlim()


@pytest.mark.parametrize(
    "draw", [lambda: law_of_sizes([], (1, 1.0), LAW, floor=1.0), lambda: panels_of_bars({"a": [1.0]}, ["x", "y"])]
)
def test_nothing_to_draw_is_said(draw):
    with pytest.raises(ConfigError):
        draw()
