import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Annotation

from minimegatron.errors import ConfigError
from minimegatron.viz.dataflow import PAIR, Meeting, Tensor, flow
from minimegatron.viz.picture import COMM, PAPER, rank_colours
from tests.viz.reading import boxes, overlaps, words


def dark(axes):
    """Left edges of the boxes in which ranks talk."""
    return [p.get_x() for p in axes.patches if to_hex(p.get_facecolor()) == COMM]


def test_g_sends_forward_and_f_backward_at_the_other_end():
    forward, backward = flow().axes
    [g], [f] = dark(forward), dark(backward)
    middle = forward.get_xlim()[1] / 2
    assert f < middle < g


@pytest.mark.parametrize("ranks", [2, 3])
def test_there_is_one_arrow_a_step_and_rank_all_in_the_direction_of_the_pass(ranks):
    for axes, way in zip(flow(ranks=ranks).axes, (1, -1), strict=True):
        arrows = [t for t in axes.texts if isinstance(t, Annotation)]
        assert len(arrows) == ranks * (len(PAIR) - 1)
        assert all((a.xy[0] - a.xyann[0]) * way > 0 for a in arrows)


def test_what_every_rank_has_is_grey_and_what_one_has_is_its_colour():
    forward = flow().axes[0]
    colours = {t.get_text(): to_hex(p.get_facecolor()) for p, t in _labelled(forward)}
    assert colours["x"] == colours["z"] == PAPER
    assert {p.get_hatch() for p, t in _labelled(forward) if t.get_text() in "xz"} == {"//"}
    assert [colours["y₀"], colours["y₁"]] == rank_colours(2)


def _labelled(axes):
    for text in axes.texts:
        for patch in axes.patches:
            x, y = patch.get_x() + patch.get_width() / 2, patch.get_y() + patch.get_height() / 2
            if text.get_text() and abs(x - text.get_position()[0]) < 1e-6 and abs(y - text.get_position()[1]) < 0.05:
                yield patch, text


def test_partial_sums_are_dashed_right_before_the_sum():
    hatched = [[p.get_x() for p in axes.patches if p.get_linestyle() == "--"] for axes in flow().axes]
    assert min(hatched[0]) > 8 and max(hatched[1]) < 4  # before g, at the right; before f, at the left
    assert [len(xs) for xs in hatched] == [2, 2]


def test_no_two_words_on_each_other_and_a_legend():
    figure = flow()
    assert not overlaps(figure)
    assert {"the ranks talk", "partial sum", "only on rank 1"} <= set(words(figure))
    assert len(boxes(figure)) > 20


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="without steps"):
        flow([])
    with pytest.raises(ConfigError, match="'halved'"):
        flow([Tensor("x", "dx", "halved", "whole"), Meeting("f", "nothing", "all-reduce")])
