import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.pareto import front, pareto
from tests.viz.reading import overlaps, words

GIB = 2**30
POINTS = [(8 * GIB, 4.0), (2 * GIB, 9.0), (4 * GIB, 5.0), (5 * GIB, 5.5), (8 * GIB, 3.0), (16 * GIB, 3.0)]
FRONT = [(2 * GIB, 9.0), (4 * GIB, 5.0), (8 * GIB, 3.0)]
PLANNED = [(4.2 * GIB, 5.2), (8.5 * GIB, 3.1)]


def curves(figure):
    return {line.get_label(): [tuple(map(float, xy)) for xy in line.get_xydata()] for line in figure.axes[0].lines}


def test_the_front_is_what_no_other_beats_in_both():
    assert front(POINTS) == FRONT
    for point in POINTS:
        beaten = any(o != point and o[0] <= point[0] and o[1] <= point[1] for o in POINTS)
        assert beaten == (point not in FRONT)


def test_every_estimate_the_front_the_plans_and_the_fastest_of_them():
    figure = pareto(POINTS, PLANNED, "tp 8", limit=12 * GIB, title="All layouts")
    seen = curves(figure)
    assert seen["estimated: 6"] == [(n / GIB, s) for n, s in POINTS]
    assert seen["their front"] == [(n / GIB, s) for n, s in FRONT]
    assert seen["planned: 2"] == [(4.2, 5.2), (8.5, 3.1)] and seen["the fastest: tp 8"] == [(8.5, 3.1)]
    assert {x for x, _ in seen["memory for tensors"]} == {12.0}
    assert {"GiB of the fullest rank", "the fastest: tp 8"} <= set(words(figure)) and not overlaps(figure)


def test_without_a_limit_that_is_near_there_is_no_line():
    for limit in (None, 200 * GIB):  # far away
        assert "memory for tensors" not in curves(pareto(POINTS, PLANNED, "", limit=limit))


def test_nothing_to_draw_is_refused():
    with pytest.raises(ConfigError, match="0 estimates and 2 plans"):
        pareto([], PLANNED, "")
    with pytest.raises(ConfigError, match="6 estimates and 0 plans"):
        pareto(POINTS, [], "")
