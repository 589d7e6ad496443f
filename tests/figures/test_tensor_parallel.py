import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Annotation

from course.figures.tensor_parallel import (
    FEATURES,
    LAYER,
    NOTHING,
    PAIR,
    TOKENS,
    WHOLE,
    Meeting,
    Message,
    Shards,
    Tensor,
    border,
    columns_of,
    cut_product,
    flow,
    product,
    regions,
    rows_of,
    shards,
    strips,
    weight_shards,
)
from minimegatron.comm.mesh import Axis
from minimegatron.errors import ConfigError
from minimegatron.layers.param import cut_evenly
from minimegatron.viz.picture import COMM
from tests.viz.reading import boxes, overlaps, words

X, A = [[1, 2], [3, 4]], [[5, 6], [7, 8]]
PART = [[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]]


def test_a_product_shows_every_factor_and_every_result():
    assert product(X, A) == [[19, 22], [43, 50]]
    columns, rows = columns_of(X, A, 2), rows_of(X, A, 2)
    assert [s.y for s in columns] == [[[19], [43]], [[22], [50]]]
    assert [s.y for s in rows] == [[[5, 6], [15, 18]], [[14, 16], [28, 32]]]
    figure = cut_product(X, A)
    for axes, shares in zip(figure.axes, (columns, rows), strict=True):
        want = [n for s in shares for m in (s.x, s.a, s.y) for row in m for n in row]
        shown = sorted(int(t.get_text()) for t in axes.texts if t.get_text().isdigit())
        assert shown == sorted([*want, 19, 22, 43, 50])
    assert [sum(p.get_hatch() == "//" for p in axes.patches) for axes in figure.axes] == [2 * 4, 0]  # on every rank
    assert [sum(p.get_linestyle() == "--" for p in axes.patches) for axes in figure.axes] == [0, 2 * 4]  # partial sums
    assert not overlaps(figure)


def test_shards_tile_the_weight_in_proportion_and_name_their_ranges():
    tp = Axis("tp", (0, 1), 0)
    gated = Shards("fc1 [gate; up]", (32, 8), 0, cut_evenly(32, tp, "fc1", blocks=2), ("gate", "up"))
    figure = weight_shards([gated, Shards("norm", (8,)), Shards("fc2", (8, 16), 1, cut_evenly(16, tp, "fc2"))])
    first, norm, fc2 = (axes for axes in figure.axes if axes.get_visible())
    ranges = [t.get_text() for t in first.texts if "rank" in t.get_text()]
    assert ranges == ["rank 0\n[0:8]", "rank 0\n[16:24]", "rank 1\n[8:16]", "rank 1\n[24:32]"]
    assert sorted((p.get_y(), p.get_height()) for p in first.patches) == [(i / 4, 0.25) for i in range(4)]
    assert [t.get_position()[1] for t in first.texts if t.get_text() in ("gate", "up")] == [0.25, 0.75]
    assert len(norm.patches) == 1 and sum(p.get_width() for p in fc2.patches) == pytest.approx(1.0)
    assert "every rank holds all" in words(figure) and not overlaps(figure)


def test_g_sends_forward_and_f_backward_at_the_other_end_and_partial_sums_stand_before_them():
    figure = flow()
    places = [[p.get_x() for p in axes.patches if to_hex(p.get_facecolor()) == COMM] for axes in figure.axes]
    [g], [f] = places
    assert f < figure.axes[0].get_xlim()[1] / 2 < g
    sums = [[p.get_x() for p in axes.patches if p.get_linestyle() == "--"] for axes in figure.axes]
    assert [len(xs) for xs in sums] == [2, 2] and min(sums[0]) > 8 and max(sums[1]) < 4
    for axes, way in zip(figure.axes, (1, -1), strict=True):
        arrows = [t for t in axes.texts if isinstance(t, Annotation)]
        assert len(arrows) == 2 * (len(PAIR) - 1) and all((a.xy[0] - a.xyann[0]) * way > 0 for a in arrows)
    assert not overlaps(figure)


def test_dark_arrows_are_the_messages_and_both_ways_through_a_layer_send_the_same():
    sent = {NOTHING: 0, "all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}  # in units of n (t-1)/t
    for axes, cuts in zip(regions().axes, LAYER.values(), strict=True):
        messages = [text for pair in zip(cuts, cuts[1:], strict=False) for text in border(*pair)]
        assert sum(sent[text] for text in messages) == 8
        arrows = [t for t in axes.texts if isinstance(t, Annotation)]
        dark = [a for a in arrows if to_hex(a.arrow_patch.get_edgecolor()) == COMM]
        assert (len(arrows), len(dark)) == (8, sum(text != NOTHING for text in messages))
    cut = boxes(regions({"sp": [TOKENS, FEATURES]}, ["norm", "fc1"], ranks=4))
    assert [(p.get_width(), p.get_height()) for p in cut] == [(1, 0.25)] * 4 + [(0.25, 1)] * 4
    assert not overlaps(regions())


def test_a_message_is_as_wide_as_its_bytes():
    programs = {
        "tp": [Message("all_reduce", 2048), Message("all_reduce", 2048, backward=True)],
        "sp": [Message("all_gather", 1024), Message("all_gather", 1024, backward=True, again=True)],
    }
    figure = strips(programs, {"tp": 4096})
    assert [(b.get_width(), b.get_linestyle()) for b in boxes(figure)] == [(2, "-"), (2, "-"), (1, "-"), (1, "--")]
    assert {"4 KiB sent\n4 KiB predicted", "2 KiB sent", "x gathered again, for dW"} <= set(words(figure))
    assert not overlaps(figure)


def test_shards_as_images_stand_below_each_other_on_one_scale():
    figure = shards({"equal": [PART, PART], "other": [PART, [[0.0] * 3] * 2]}, title="fc1")
    equal, other = (axes.images[0] for axes in figure.axes)
    assert np.array_equal(np.asarray(equal.get_array()), np.array(PART + PART))
    assert equal.get_clim() == other.get_clim() == (-3.0, 3.0)
    assert {tuple(line.get_ydata()) for line in figure.axes[0].lines} == {(1.5, 1.5)}
    assert [w for w in words(figure) if w.startswith("rank")] == ["rank 0", "rank 1"] * 2 and not overlaps(figure)


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: cut_product([[1, 2, 3]], A), "do not fit"),
    (lambda: cut_product(X, A, ranks=3), "2 x 2, on 3 ranks"),
    (lambda: weight_shards([]), "no weights"),
    (lambda: weight_shards([Shards("w", (1, 2, 3))]), "has 3 dims"),
    (lambda: flow([]), "without steps"),
    (lambda: flow([Tensor("x", "dx", "halved", "whole"), Meeting("f", "nothing", "all-reduce")]), "'halved'"),
    (lambda: regions({}), "no way"),
    (lambda: regions({"short": [WHOLE, FEATURES]}), "cuts 2 parts of 5"),
    (lambda: border(WHOLE, TOKENS), "from whole to tokens"),
    (lambda: strips({"none": []}), "no message"),
    (lambda: strips({"odd": [Message("send", 1)]}), "a message called send"),
    (lambda: shards({"empty": []}), "no matrix"),
    (lambda: shards({"torn": [PART, [[1.0]]]}), "differ in length"),
])  # fmt: skip
def test_mistakes_are_named(draw, message):
    with pytest.raises(ConfigError, match=message):
        draw()
