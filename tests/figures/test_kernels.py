import math

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from course.figures.kernels import (
    ACTIVE,
    GLOBAL,
    PASSIVE,
    REGISTERS,
    SHARED,
    access_map,
    butterfly,
    butterfly_steps,
    dealt,
    error_bars,
    hierarchy,
    kinds,
    number_lines,
    numbers_of,
    online_softmax,
    reduction_tree,
    scaled_tiles,
    score_tiles,
    sectors,
    softmax_states,
    tree_steps,
)
from minimegatron.errors import ConfigError
from tests.viz.reading import boxes, overlaps, words

VALUES = [3, 1, 4, 1, 5, 9, 2, 6]
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
BEFORE = [[0.5, 0.001, 2.0, 400.0], [0.25, -0.5, 0.0, -0.75]]
WHOLE = [[0.5, 0.0, 2.0, 400.0], [0.25, -0.5, 0.0, -0.75]]


def count(figure, *colours):
    drawn = [to_hex(box.get_facecolor()) for box in boxes(figure)]
    return [drawn.count(colour) for colour in colours]


def test_each_block_each_thread_and_each_memory_is_drawn_once():
    assert dealt(5, 2) == [[0, 2, 4], [1, 3]]
    figure = hierarchy(blocks=3, threads=64, sms=2)
    assert count(figure, PASSIVE, REGISTERS, SHARED, GLOBAL) == [64, 3 + 2, 2, 1]
    assert {"grid: 3 blocks", "block 2", "block 0, 2", "thread 5 of block 2: i = 2 * 64 + 5 = 133"} <= set(
        words(figure)
    )
    assert not overlaps(figure)


def test_what_was_asked_is_dark_what_came_along_is_light_and_sectors_have_borders():
    apart, together = [thread * 16 for thread in range(4)], list(range(4))
    assert sectors((4, 16), apart) == {0, 2, 4, 6} and sectors((1, 16), [7, 8]) == {0, 1}
    figure = access_map((4, 16), {"apart": apart, "together": together})
    assert count(figure, ACTIVE, PASSIVE) == [8, 4 * 7 + 4]
    assert "apart: 4 threads ask, 4 sectors (of 8 numbers) are fetched" in words(figure)
    assert "together: 4 threads ask, 1 sector (of 8 numbers) is fetched" in words(figure)
    borders = [p for p in figure.axes[0].patches if isinstance(p, Rectangle) and not p.get_fill()]
    assert [(p.get_x(), p.get_y(), p.get_width()) for p in borders] == [(x, y, 8) for y in range(4) for x in (0, 8)]
    assert not overlaps(figure)


def across(figure):
    """(column of the number, column of the sum, row of the sum) of each line that leads to another column."""
    notes = [t for t in figure.axes[0].texts if getattr(t, "arrow_patch", None) is not None]
    found = {(int(t.xyann[0]), int(t.xy[0]), round((0.62 - t.xy[1]) / 1.7)) for t in notes}
    return {(a, b, step) for a, b, step in found if a != b}


def test_a_tree_halves_the_threads_that_add_and_a_butterfly_keeps_all_busy():
    assert tree_steps(VALUES)[1:] == [
        [8, 10, 6, 7, 5, 9, 2, 6], [14, 17, 6, 7, 5, 9, 2, 6], [31, 17, 6, 7, 5, 9, 2, 6],
    ]  # fmt: skip
    assert butterfly_steps(VALUES)[1] == [8, 10, 6, 7] * 2 and butterfly_steps(VALUES)[-1] == [31] * 8
    tree, flat = reduction_tree(VALUES), butterfly(VALUES)
    assert count(tree, SHARED, ACTIVE, PASSIVE) == [8, 4 + 2 + 1, 4 + 6 + 7]
    assert count(flat, SHARED, ACTIVE, PASSIVE) == [8, 24, 0]
    assert across(tree) == {(4, 0, 1), (5, 1, 1), (6, 2, 1), (7, 3, 1), (2, 0, 2), (3, 1, 2), (1, 0, 3)}
    assert across(flat) == {(i ^ o, i, step) for step, o in ((1, 4), (2, 2), (3, 1)) for i in range(8)}
    assert (words(tree).count("31"), words(flat).count("31")) == (1, 8)
    assert (words(tree).count("__syncthreads()"), words(flat).count("__syncthreads()")) == (4, 0)
    assert not overlaps(tree) and not overlaps(flat)


def test_scores_that_count_that_are_masked_and_that_are_never_computed():
    assert kinds(8, 4, 2) == [["half", "half", "hidden", "hidden"], ["full", "full", "half", "half"]]
    assert kinds(4, 2, 4) == [["half"], ["half"]]
    figure = score_tiles(8, 4, 2)
    assert count(figure, ACTIVE, PASSIVE) == [36, 4 * 4 + 4 * 8 - 36] and len(boxes(figure)) == 64
    assert {"queries 0 to 3: loads 4 keys, 4 values", "queries 4 to 7: loads 8 keys, 8 values"} <= set(words(figure))
    assert not overlaps(figure)


def test_what_a_query_keeps_ends_as_the_softmax_of_all_its_scores():
    """out by torch's softmax, lse by its logsumexp; l and o under the new maximum."""
    scores, values = torch.tensor([1.0, 2.0, 4.0]).double(), torch.tensor([10.0, 20.0, 30.0]).double()
    states = softmax_states([[1, 2], [4]], [[10, 20], [30]])
    m, total, out = states[-1]
    assert out / total == pytest.approx((scores.softmax(0) * values).sum().item())
    assert m + math.log(total) == pytest.approx(scores.logsumexp(0).item())
    figure = online_softmax([[1, 2], [4]], [[10, 20], [30]])
    said = set(words(figure))
    assert {"-∞", "1.368", "23.68", "1.185", "33.2", "nothing yet", "l, o times\ne^(2 - 4) = 0.135"} <= said
    assert "out = o / l = 28.02\nlse = m + log l = 4.17" in said and not overlaps(figure)


def test_what_a_cast_loses_is_marked_and_a_scale_stands_below_each_tile():
    tiles = ("tiles", (1, 2), [[512.0, 1.0], [512.0, 0.3]], BEFORE)
    figure = scaled_tiles(BEFORE, [("one scale", (2, 4), [[1.0]], WHOLE), tiles])
    marked = [box for box in boxes(figure) if box.get_hatch()]
    assert [(round(box.get_x()), round(box.get_y())) for box in marked] == [(1, 0)]
    assert [words(figure).count(text) for text in ("scale 2^9", "scale 2^0", "scale 0.3", "-0")] == [2, 2, 1, 0]
    borders = [p for p in figure.axes[2].patches if isinstance(p, Rectangle) and not p.get_fill()]
    assert [(p.get_x(), p.get_width()) for p in borders] == [(0, 2), (2, 2), (0, 2), (2, 2)] and not overlaps(figure)


@pytest.mark.parametrize(("format", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_the_numbers_are_those_of_torchs_dtype(format, dtype):
    every = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    assert numbers_of(format, 0.0, format[2]) == sorted(every[every.isfinite()].tolist())


def test_a_mark_stands_at_each_number_and_each_error_is_a_bar_with_its_value():
    figure = number_lines({"E4M3": E4M3, "E5M2": E5M2}, [(1, 4), (0, 2**-5)])
    marks = [[list(line.get_xdata()) for line in axes.lines if line.get_marker() == "|"] for axes in figure.axes]
    assert marks[0][1] == [1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4] and marks[1][0][:3] == [0, 2**-9, 2**-8]
    assert not overlaps(figure)
    figure = error_bars(["as before", "grown"], {"delayed": [0.026, 0.8], "current": [0.026, 0.025]}, "Errors")
    assert [bar.get_height() for bar in figure.axes[0].patches] == [0.026, 0.8, 0.026, 0.025]
    assert {"80.0%", "2.5%", "as before", "delayed"} <= set(words(figure)) and not overlaps(figure)


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: dealt(0, 2), "0 blocks on 2 SMs"),
    (lambda: hierarchy(threads=48), "48 threads"),
    (lambda: access_map((4, 12), {"apart": [0]}), "rows of 12 numbers"),
    (lambda: access_map((4, 16), {"beyond": [64]}), "no place 64"),
    (lambda: access_map((4, 16), {}), "no access"),
    (lambda: reduction_tree([1.0] * 6), "6 numbers"),
    (lambda: butterfly([]), "0 numbers"),
    (lambda: kinds(8, 3, 2), "do not divide 8"),
    (lambda: scaled_tiles(BEFORE, [("short", (1, 2), [[1.0]], [[1.0]])]), "another shape"),
    (lambda: scaled_tiles(BEFORE, []), "no tiles"),
    (lambda: number_lines({"E4M3": E4M3}, [(500, 600)]), "no number from 500"),
    (lambda: error_bars(["one"], {"delayed": [0.0]}), "cannot be drawn"),
    (lambda: error_bars(["one"], {}), "0 recipes"),
    (lambda: online_softmax([[1, 2]], [[10]]), "as many values as scores"),
])  # fmt: skip
def test_mistakes_are_named(draw, message):
    with pytest.raises(ConfigError, match=message):
        draw()
