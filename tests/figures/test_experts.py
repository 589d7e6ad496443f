import itertools

import pytest
import torch
from matplotlib.collections import PolyCollection

from course.figures.experts import busiest, copies, dispatch_steps, imbalance, journey, load_bands, routing_grid
from minimegatron.errors import ConfigError
from minimegatron.viz.picture import COMM
from tests.viz.reading import boxes, overlaps, words

TOP2 = [[True, True, False, False], [False, True, False, True], [False, True, True, False]]
KEPT = [[True, True, False, False], [False, True, False, True], [False, False, True, False]]


def test_a_square_for_every_row_in_the_colour_of_its_rank():
    squares = boxes(routing_grid({"top 2": TOP2}, ranks=2))
    places = [(int(s.get_x()), int(s.get_y())) for s in squares]
    assert places == [(e, t) for t, row in enumerate(TOP2) for e, goes in enumerate(row) if goes]
    left, right = ({s.get_facecolor() for s in squares if int(s.get_x()) // 2 == rank} for rank in (0, 1))
    assert len(left) == len(right) == 1 and left != right


def test_what_is_dropped_is_a_cross_and_counted_for_no_expert_and_no_rank():
    figure = routing_grid({"all": TOP2, "room for two": TOP2}, ranks=2, kept={"room for two": KEPT})
    for axes, experts, ranks in zip(figure.axes, ("1311", "1211"), (["4", "2"], ["3", "2"]), strict=True):
        below = [t.get_text() for t in axes.texts if t.get_text().isdigit() and t.get_position()[1] > len(TOP2)]
        assert below == [*experts, *ranks]
    all_of_them, limited = figure.axes
    assert len(limited.lines) - len(all_of_them.lines) == 2, "one cross"
    assert {"rank 0", "rank 1", "tokens", "expert"} <= set(words(figure)) and not overlaps(figure)


def test_bands_fill_each_step_and_a_thick_line_ends_the_work_of_a_rank():
    figure = load_bands({"run": [[1, 2, 3, 2], [4, 0, 2, 2]]}, ranks=2)
    (axes,) = figure.axes
    bands = [c for c in axes.collections if isinstance(c, PolyCollection)]
    assert [max(y for x, y in band.get_paths()[0].vertices if x == 1) for band in bands] == [0.5, 0.5, 0.75, 1]
    faces = [tuple(band.get_facecolor()[0]) for band in bands]
    assert faces[0] == faces[1] != faces[2] == faces[3]
    (border,) = [line for line in axes.lines if line.get_linewidth() > 1]
    assert list(border.get_ydata()) == [3 / 8, 4 / 8]
    assert [t.get_text() for t in axes.texts] == ["0", "1", "2", "3", "expert"] and not overlaps(figure)
    crowded = {"run": [[1, 1, 1, 97, 0, 0, 0, 0]], "other": [[0] * 7 + [1]]}
    assert not overlaps(load_bands(crowded, ranks=2)), "names of bands that have become nothing"
    (axes,) = load_bands({"run": [[2, 2], [0, 4], [4, 0], [1, 1]]}, every=2).axes
    lower = next(c for c in axes.collections if isinstance(c, PolyCollection)).get_paths()[0].vertices
    assert {(x, max(y for at, y in lower if at == x)) for x in (0, 2)} == {(0, 0.25), (2, 5 / 6)}


def test_imbalance_draws_loads_as_they_are_and_losses_as_differences():
    assert busiest([[1, 1, 1, 1], [4, 0, 0, 0], [3, 1, 0, 0]]) == [1, 4, 3]
    assert busiest([[4, 0], [0, 4], [3, 1]], every=2) == [1, 1.5]
    loads = {"alone": [[4, 0], [4, 0]], "balanced": [[2, 2], [3, 1]]}
    losses = {"alone": [5.0, 4.0], "balanced": [5.5, 3.0], "seed": [5.25, 4.0]}
    load, loss = imbalance(loads, losses, "seed", every=1).axes
    assert [list(line.get_ydata()) for line in load.lines] == [[2, 2], [1, 1.5]]
    apart = {line.get_label(): list(line.get_ydata()) for line in loss.lines}
    assert apart == {"seed": [0.25, 0.0], "balanced": [0.5, -1.0]}
    with pytest.raises(ConfigError, match=r"of which \['other'\] have no loss"):
        imbalance(loads, losses, "other")


def test_a_machine_is_met_by_a_row_for_each_expert_or_by_one_copy():
    figure = copies({1: (1, 2, 3), 2: (2,)})
    rows, once = ([line for line in axes.lines if line.get_color() == COMM] for axes in figure.axes)
    assert (len(rows), len(once)) == (4, 2)
    assert words(figure).count("expert") == 8 and not overlaps(figure)
    for wrong in ({0: (1,)}, {1: (4,)}):
        with pytest.raises(ConfigError):
            copies(wrong)


# ------------------------------------------------------------------------------------------------- the dispatch


def chosen(*experts, of=4):
    """A map from the experts of each token."""
    return [[e in some for e in range(of)] for some in experts]


def named(rows):
    return [" ".join(row.name for row in of) for of in rows]


MAPS = [chosen((1, 2), (1, 3), (1, 3)), chosen((0, 1), (0, 2), (0, 1))]


def test_rows_leave_by_expert_come_by_sender_and_work_by_expert():
    way = journey(MAPS)
    assert named(way.leaving) == ["a1 b1 c1 a2 b3 c3", "d0 e0 f0 d1 f1 e2"]
    assert named(way.arriving) == ["a1 b1 c1 d0 e0 f0 d1 f1", "a2 b3 c3 e2"]
    assert named(way.working) == ["d0 e0 f0 a1 b1 c1 d1 f1", "a2 e2 b3 c3"]
    assert way.counts == [[0, 3, 1, 2], [3, 2, 1, 0]]
    assert way.blocks == [[[0, 3], [3, 2]], [[1, 2], [1, 0]]]
    assert [way.input_splits(r) for r in (0, 1)] == [[3, 3], [5, 1]]
    assert [way.output_splits(r) for r in (0, 1)] == [[3, 5], [3, 1]]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_nothing_is_lost_and_splits_fit_on_any_number_of_ranks(world):
    draw = torch.Generator().manual_seed(world)
    way = journey([(torch.rand(4, 2 * world, generator=draw) > 0.5).tolist() for _ in range(world)])
    everything = sorted(" ".join(named(way.leaving)).split())
    assert everything == sorted(" ".join(named(way.arriving)).split()) == sorted(" ".join(named(way.working)).split())
    for i, j in itertools.product(range(world), repeat=2):
        assert way.input_splits(i)[j] == way.output_splits(j)[i]


def test_each_line_holds_the_rows_of_its_step_and_dark_lines_are_those_that_change_their_rank():
    figure, way = dispatch_steps(MAPS), journey(MAPS)
    squares = boxes(figure)
    lines = [[s for s in squares if s.get_y() == y] for y in sorted({s.get_y() for s in squares})]
    colour = dict(zip("abcdef", (s.get_facecolor() for s in sorted(lines[0], key=lambda s: s.get_x())), strict=True))
    for line, rows in zip(lines[1:], (way.leaving, way.arriving, way.working), strict=True):
        in_order = [s.get_facecolor() for s in sorted(line, key=lambda s: s.get_x())]
        assert in_order == [colour[row.token] for of in rows for row in of]
    assert sum(line.get_color() == COMM for line in figure.axes[0].lines) == 8
    said = ("counts [0, 3, 1, 2]   input splits [3, 3]", "blocks [[0, 3], [3, 2]]   output splits [3, 5]",
            "rows of each expert [3, 5]", "rank 0 holds experts 0, 1")  # fmt: skip
    assert [words(figure).count(text) for text in said] == [1] * 4 and not overlaps(figure)
    idle = dispatch_steps([chosen((0, 1), (0, 1)), chosen((0, 1), (1,))])
    assert words(idle).count("no rows") == 2 and not overlaps(idle)


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: routing_grid({"top 2": TOP2}, ranks=3), "cannot be dealt out over 3 ranks"),
    (lambda: routing_grid({"torn": [[True], [True, False]]}), r"are \[1, 2\] wide"),
    (lambda: routing_grid({}), "no routing to draw"),
    (lambda: load_bands({"empty": [[0, 0]]}), "no rows"),
    (lambda: load_bands({}), "no load to draw"),
    (lambda: load_bands({"run": [[1, 2, 3, 2]]}, ranks=3), "cannot be dealt out over 3 ranks"),
    (lambda: imbalance({"alone": [[4, 0]]}, {"alone": [1.0]}, "alone"), "1 runs to compare"),
    (lambda: journey([*MAPS, chosen((0, 1))]), r"over 3 ranks whose maps are \[4\] wide"),
    (lambda: journey([]), "over 0 ranks"),
    (lambda: journey([chosen(*[(0,)] * 14), chosen(*[(0,)] * 14)]), "28 tokens for 26 letters"),
])  # fmt: skip
def test_mistakes_are_named(draw, message):
    with pytest.raises(ConfigError, match=message):
        draw()
