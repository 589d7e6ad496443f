"""Collectives, the ring and the stream of samples: the numbers and names that a reader sees are those of the rule."""

import pytest
from matplotlib.colors import to_rgba

from course.figures.process_groups import (
    COLLECTIVES,
    LEGEND,
    blocks_of,
    moved,
    replay,
    ring_steps,
    sends_in,
    sends_of,
    sheet,
    start_of,
    who_reads,
)
from minimegatron.errors import ConfigError
from minimegatron.viz.picture import RANKS
from tests.viz.reading import boxes, overlaps, words


def values(state):
    return [[block and block.value for block in row] for row in state]


def test_the_numbers_of_two_ranks():
    after = {name: values(moved(name, blocks_of(name, 2, 1), 1)) for name in COLLECTIVES}
    assert after == {
        "broadcast": [[20, 21], [20, 21]], "scatter": [[20, None], [None, 21]],
        "gather": [[None, None], [10, 21]], "all_gather": [[10, 21], [10, 21]],
        "reduce": [[None, None], [30, 32]], "reduce_scatter": [[30, None], [None, 32]],
        "all_reduce": [[30, 32], [30, 32]], "all_to_all": [[10, 20], [11, 21]],
    }  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_drawn_with_the_numbers_of_both_sides(name):
    figure = sheet([name], 3)
    start = blocks_of(name, 3)
    shown = [v for state in (start, moved(name, start)) for row in values(state) for v in row if v is not None]
    assert sorted(int(w) for w in words(figure) if w.isdigit()) == sorted(shown) and not overlaps(figure)


def test_the_sheet_shows_all():
    figure = sheet()
    assert [a.get_title(loc="left") for a in figure.axes if a.get_visible()] == list(COLLECTIVES)
    assert words(figure).count(LEGEND) == 1 and not overlaps(figure)


def test_a_ring_of_three_ranks_by_hand():
    steps = [values(held) for held in replay(start_of(3), sends_of(3))]
    assert steps == [
        [[1, 2, 3], [10, 20, 30], [100, 200, 300]],
        [[1, 2, 303], [11, 20, 30], [100, 220, 300]],
        [[1, 222, 303], [11, 20, 333], [111, 220, 300]],
        [[111, 222, 303], [11, 222, 333], [111, 220, 333]],
        [[111, 222, 333]] * 3,
    ]
    other = [[(part + 1) % 3 for part in step] for step in sends_of(3)]  # it may begin with another part
    assert values(replay(start_of(3), other)[-1]) == steps[-1]
    assert sends_in([[1.0, 303.0], [20.0, 11.0], [300.0, 220.0]]) == sends_of(3)[:2]


def test_the_ring_shows_all_numbers_and_an_arrow_carries_the_letter_of_the_framed_part():
    figure = ring_steps()
    held = [v for state in replay(start_of(3), sends_of(3)) for row in values(state) for v in row]
    assert sorted(int(word) for word in words(figure) if word.isdigit()) == sorted(held) and not overlaps(figure)
    (axes,) = figure.axes
    frames = [p for p in axes.patches if not p.get_fill() and p.get_linewidth() > 2]
    letters = [t for t in axes.texts if t.get_text() in list("ABC") and t.get_position()[1] > 0]
    for frame, letter in zip(frames, letters, strict=True):
        x, y = frame.get_xy()
        assert letter.get_text() == "ABC"[round(x) % 5] and letter.get_position()[1] == pytest.approx(y + 0.5)


def test_samples_stand_in_the_colour_of_their_rank_and_an_epoch_ends_in_the_second_row():
    figure = who_reads([("2 ranks", [[[4, 1], [0, 3]]]), ("4 ranks", [[[2], [3], [1], [4]]])], 5)
    owners = [RANKS.index(c) for b in boxes(figure)[:8] for c in RANKS if to_rgba(c) == b.get_facecolor()]
    assert owners == [0, 0, 1, 1, 0, 1, 2, 3]
    assert [int(w) for w in words(figure) if w.isdigit()] == [4, 1, 0, 3, 2, 3, 1, 4]
    assert {"step 0", "step 1", "rank 3"} <= set(words(figure)) and not overlaps(figure)
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == [1]  # 4 places in the first row, then 1


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: sheet(["allgather"]), "did you mean `all_gather`"),
    (lambda: blocks_of("broadcast", src=4), "source 4 in a group of 4"),
    (lambda: moved("all_reduce", [[None]] * 3), "3 blocks"),
    (lambda: replay(start_of(3), sends_of(3)[:3]), "3 steps"),
    (lambda: ring_steps(sends=[[0, 1, 3], *sends_of(3)[1:]]), "part 3 of 3"),
    (lambda: sends_in([[12.0]]), "no part"),
    (lambda: who_reads([("empty", [[[], []]])], 5), "no rank reads"),
])  # fmt: skip
def test_mistakes_are_named(draw, message):
    with pytest.raises(ConfigError, match=message):
        draw()
