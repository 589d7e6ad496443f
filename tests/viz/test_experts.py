import itertools

import pytest
from matplotlib.collections import PolyCollection

from minimegatron.errors import ConfigError
from minimegatron.viz.experts import _spread, busiest, imbalance, load_bands, routing_grid
from tests.viz.reading import boxes, overlaps, words

TOP2 = [[True, True, False, False], [False, True, False, True], [False, True, True, False]]
KEPT = [[True, True, False, False], [False, True, False, True], [False, False, True, False]]


def test_a_square_for_every_row_in_the_colour_of_the_rank():
    squares = boxes(routing_grid({"top 2": TOP2}, ranks=2))
    places = [(int(s.get_x()), int(s.get_y())) for s in squares]
    assert places == [(e, t) for t, row in enumerate(TOP2) for e, goes in enumerate(row) if goes]
    colour = {rank: {s.get_facecolor() for s in squares if int(s.get_x()) // 2 == rank} for rank in (0, 1)}
    assert [len(c) for c in colour.values()] == [1, 1] and colour[0] != colour[1]


def below(axes, tokens):
    return [t.get_text() for t in axes.texts if t.get_text().isdigit() and t.get_position()[1] > tokens]


def test_the_experts_are_named_above_their_columns():
    (axes,) = routing_grid({"top 2": TOP2}, ranks=2).axes
    named = {
        t.get_text(): t.get_position()[0] for t in axes.texts if t.get_text().isdigit() and t.get_position()[1] < 0
    }
    assert named == {"0": 0.5, "1": 1.5, "2": 2.5, "3": 3.5}
    assert {"expert", "rows per\nexpert"} <= {t.get_text() for t in axes.texts}


def test_what_is_dropped_is_a_cross_and_no_longer_counted():
    figure = routing_grid({"all": TOP2, "room for two": TOP2}, kept={"room for two": KEPT})
    of_all, limited = figure.axes
    assert below(of_all, len(TOP2)) == ["1", "3", "1", "1"] and below(limited, len(TOP2)) == ["1", "2", "1", "1"]
    assert len(limited.lines) - len(of_all.lines) == 2, "one cross"
    assert not overlaps(figure)


def test_the_ranks_stand_above_their_columns():
    figure = routing_grid({"top 2": TOP2}, ranks=2)
    assert {"rank 0", "rank 1", "tokens", "expert"} <= set(words(figure)) and not overlaps(figure)
    assert not {"rank 0", "rows per\nrank"} & set(words(routing_grid({"top 2": TOP2})))


def test_the_rows_of_each_rank_stand_below_its_columns_less_what_is_dropped():
    figure = routing_grid({"all": TOP2, "room for two": TOP2}, ranks=2, kept={"room for two": KEPT})
    for axes, sums in zip(figure.axes, (["4", "2"], ["3", "2"]), strict=True):
        label = next(t for t in axes.texts if t.get_text() == "rows per\nrank")
        line = [t for t in axes.texts if t.get_position()[1] == label.get_position()[1] and t is not label]
        assert [(t.get_text(), t.get_position()[0]) for t in line] == [(sums[0], 1.0), (sums[1], 3.0)]
    assert not overlaps(figure)


def test_bands_fill_each_step_and_are_named_where_the_run_ends():
    figure = load_bands({"even": [[2, 2], [3, 1]], "one": [[4, 0], [4, 0]]})
    even, one = figure.axes
    bands = [c for c in even.collections if isinstance(c, PolyCollection)]
    tops = [max(y for x, y in band.get_paths()[0].vertices if x == 1) for band in bands]
    assert tops == [0.75, 1.0]
    for axes in (even, one):  # also the band that has become nothing
        assert [t.get_text() for t in axes.texts] == ["0", "1", "expert"]
    assert not overlaps(figure)
    assert not overlaps(load_bands({"run": [[1, 1, 1, 97, 0, 0, 0, 0]], "other": [[0] * 7 + [1]]}, ranks=2))


def test_numbers_keep_their_order_and_a_distance():
    assert _spread([0.1, 0.5, 0.9]) == [0.1, 0.5, 0.9]
    for wanted in ([0.0] * 8, [1.0] * 8, [0.0, 0.01, 0.5, 0.99, 1.0, 1.0], [0.5] * 30):
        places = _spread(wanted)
        gap = min(0.062, 1 / len(wanted))
        assert all(b - a >= gap - 1e-9 for a, b in itertools.pairwise(places))
        assert 0 < places[0] and places[-1] < 1


def test_steps_may_be_added_up():
    (axes,) = load_bands({"run": [[2, 2], [0, 4], [4, 0], [1, 1]]}, every=2).axes
    lower = next(c for c in axes.collections if isinstance(c, PolyCollection)).get_paths()[0].vertices
    assert {(x, max(y for at, y in lower if at == x)) for x in (0, 2)} == {(0, 0.25), (2, 5 / 6)}


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ConfigError, match="cannot be dealt out over 3 ranks"):
        routing_grid({"top 2": TOP2}, ranks=3)
    with pytest.raises(ConfigError, match=r"are \[1, 2\] wide"):
        routing_grid({"torn": [[True], [True, False]]})
    with pytest.raises(ConfigError, match="no rows"):
        load_bands({"empty": [[0, 0]]})
    for draw in (routing_grid, load_bands):
        with pytest.raises(ConfigError, match=r"no (routing|load) to draw"):
            draw({})


def test_bands_of_one_rank_have_one_colour_and_a_thick_line_ends_its_work():
    figure = load_bands({"run": [[1, 2, 3, 2], [4, 0, 2, 2]]}, ranks=2)
    assert {"experts of rank 0", "experts of rank 1"} <= set(words(figure)) and not overlaps(figure)
    (axes,) = figure.axes
    faces = [tuple(c.get_facecolor()[0]) for c in axes.collections if isinstance(c, PolyCollection)]
    assert faces[0] == faces[1] != faces[2] == faces[3]
    (border,) = [line for line in axes.lines if line.get_linewidth() > 1]
    assert "where the next rank's share begins" in words(figure)
    assert list(border.get_ydata()) == [3 / 8, 4 / 8]
    with pytest.raises(ConfigError, match="cannot be dealt out over 3 ranks"):
        load_bands({"run": [[1, 2, 3, 2]]}, ranks=3)


def test_the_busiest_expert_is_measured_by_the_mean_of_all():
    assert busiest([[1, 1, 1, 1], [4, 0, 0, 0], [3, 1, 0, 0]]) == [1, 4, 3]
    assert busiest([[4, 0], [0, 4], [3, 1]], every=2) == [1, 1.5]


def test_imbalance_draws_loads_as_they_are_and_losses_as_differences():
    loads = {"alone": [[4, 0], [4, 0]], "balanced": [[2, 2], [3, 1]]}
    losses = {"alone": [5.0, 4.0], "balanced": [5.5, 3.0], "seed": [5.25, 4.0]}
    figure = imbalance(loads, losses, "seed", every=1)
    load, loss = figure.axes
    assert [list(line.get_ydata()) for line in load.lines] == [[2, 2], [1, 1.5]]
    assert {line.get_label(): list(line.get_ydata()) for line in loss.lines} == {
        "seed": [0.25, 0.0], "balanced": [0.5, -1.0],
    }  # fmt: skip
    assert not overlaps(
        imbalance({run: 50 * of for run, of in loads.items()}, {r: 50 * of for r, of in losses.items()}, "seed")
    )
    with pytest.raises(ConfigError, match=r"of which \['other'\] have no loss"):
        imbalance(loads, losses, "other")
    with pytest.raises(ConfigError, match="1 runs to compare"):
        imbalance({"alone": loads["alone"]}, losses, "seed")
