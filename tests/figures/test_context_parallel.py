from fractions import Fraction

import pytest
from matplotlib.patches import Rectangle

from course.figures.context_parallel import (
    FULL,
    NONE,
    PART,
    causal_map,
    heads_for_tokens,
    pairs_of,
    quarters,
    ring_steps,
    running_softmax,
    steps_of,
)
from minimegatron.errors import ConfigError
from tests.viz.reading import boxes, overlaps, words

CONTIGUOUS = [list(range(4 * r, 4 * r + 4)) for r in range(4)]
ZIGZAG = [[2 * r, 2 * r + 1, 14 - 2 * r, 15 - 2 * r] for r in range(4)]
CHUNKS = [[0, 7], [1, 6], [2, 5], [3, 4]]
WEIGHTS, VALUES = [2, 1, 8, 4], [3, 6, 1, 2]


def test_each_query_has_the_colour_of_its_rank_and_the_length_of_what_it_sees():
    assert pairs_of(CONTIGUOUS) == [10, 26, 42, 58] and pairs_of(ZIGZAG) == [34] * 4
    rows = boxes(causal_map({"zigzag": ZIGZAG}))
    assert [row.get_width() for row in rows] == list(range(1, 17))
    colours = [{rows[i].get_facecolor() for i in tokens} for tokens in ZIGZAG]
    assert [len(c) for c in colours] == [1] * 4 and len(set.union(*colours)) == 4
    figure = causal_map({"contiguous": CONTIGUOUS, "zigzag": ZIGZAG})
    assert [words(figure).count(f"rank {r}") for r in range(4)] == [3, 3, 3, 2]  # rank 3 has the middle of the zigzag
    assert "pairs (query, key) of rank 0: 10  1: 26  2: 42  3: 58" in words(figure) and not overlaps(figure)


def test_a_query_of_a_packed_sequence_sees_its_own_document():
    assert pairs_of(ZIGZAG, [9, 1, 6]) == [1 + 2 + 5 + 6, 3 + 4 + 3 + 4, 5 + 6 + 1 + 2, 7 + 8 + 9 + 1]
    rows = boxes(causal_map({"zigzag": ZIGZAG}, [9, 1, 6]))
    assert [(row.get_x(), row.get_x() + row.get_width()) for row in rows] == [
        (0 if i < 9 else 9 if i < 10 else 10, i + 1) for i in range(16)
    ]
    with pytest.raises(ConfigError, match="documents of"):
        causal_map({"zigzag": ZIGZAG}, [9, 1])


def test_a_rank_of_a_packed_sequence_is_named_beside_its_bars():
    """At the left edge the names of later documents were half a picture away from their bars."""
    held = [[*range(4 * r, 4 * r + 4), *range(28 - 4 * r, 32 - 4 * r)] for r in range(4)]
    figure = causal_map({"zigzag": held}, [16, 4, 4, 4, 4])
    bars, names = boxes(figure), [t for t in figure.axes[0].texts if t.get_text().startswith("rank ")]
    assert len(names) == 7 and not overlaps(figure)
    for name in names:
        x, y = name.get_position()
        bar = bars[int(y)]
        assert 0 < x - bar.get_x() - bar.get_width() < 6 and int(y) in held[int(name.get_text()[5:])]


def test_chunks_arrive_rank_by_rank_are_sorted_and_the_frames_turn_from_columns_to_rows():
    figure = heads_for_tokens(8, CHUNKS)
    orders = [[t.get_text() for t in axes.texts if t.get_text().isdigit()][:8] for axes in figure.axes]
    assert orders == [["0", "7", "1", "6", "2", "5", "3", "4"]] * 2 + [[str(i) for i in range(8)]]
    before, arrived, in_order = (
        [p.get_bbox().bounds for p in axes.patches if not p.get_fill()] for axes in figure.axes
    )
    assert before == [(2 * r, 0, 2, 8) for r in range(4)]
    assert arrived == in_order == [(0, 2 * r, 8, 2) for r in range(4)] and not overlaps(figure)
    colour = [
        dict(zip(order, (p.get_facecolor() for p in axes.patches[:8]), strict=True))
        for order, axes in zip(orders, figure.axes, strict=True)
    ]
    assert colour[0] == colour[1] == colour[2], "a chunk keeps the colour of the rank that had it first"


def test_the_running_softmax_of_any_block_is_that_of_the_row_and_the_table_shows_each_sum():
    for block in (1, 2, 3, 4):
        last = steps_of(WEIGHTS, VALUES, block)[-1]
        assert last.out / last.total == Fraction(28, 15) and last.top * last.total == 15
    first, second = steps_of(WEIGHTS, VALUES, 2)
    assert (first.shrink, first.p, first.total, first.out) == (0, (1, Fraction(1, 2)), Fraction(3, 2), 6)
    assert (second.shrink, second.total, second.out) == (Fraction(1, 4), Fraction(15, 8), Fraction(7, 2))
    figure = running_softmax(WEIGHTS, VALUES, 2)
    want = {"ln 8", "1/4", "3/2 · 1/4  +  3/2  =  15/8", "6 · 1/4  +  2  =  7/2", "lse = m + ln l\n= ln 15"}
    assert want | {"out = O / l\n= 28/15"} <= set(words(figure)) and not overlaps(figure)


def test_with_zigzag_each_block_of_the_ring_gives_two_quarters():
    assert quarters(ZIGZAG, 1, 0) == [[PART, NONE], [FULL, PART]]  # the own block
    assert quarters(ZIGZAG, 1, 1) == [[FULL, NONE], [FULL, NONE]]  # that of an earlier rank
    assert quarters(ZIGZAG, 1, 2) == [[NONE, NONE], [FULL, FULL]]  # that of a later rank


@pytest.mark.parametrize("held", [ZIGZAG, CONTIGUOUS])
def test_what_the_ring_fills_is_the_work_of_the_ranks(held):
    """Up to the diagonal, which a triangle halves."""
    figure = ring_steps({"cut": held})
    filled = [p for p in figure.axes[0].patches if p.get_fill()]
    area = sum(0.25 if isinstance(p, Rectangle) else 0.125 for p in filled)
    assert area * len(held[0]) ** 2 == sum(pairs_of(held)) - sum(map(len, held)) / 2
    assert words(figure).count("keys of 2") == 4 and not overlaps(figure)


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: causal_map({"torn": [[0], [2]]}), r"hold \[0, 2\]"),
    (lambda: causal_map({"twice": [[0, 1], [1]]}), r"hold \[0, 1, 1\]"),
    (lambda: causal_map({}), "no cut"),
    (lambda: heads_for_tokens(3, [[0], [1]]), "heads and chunks"),
    (lambda: heads_for_tokens(2, []), "heads and chunks"),
    (lambda: running_softmax([0, 1], [1, 2], 1), "weights"),
    (lambda: ring_steps({"cut": [[0, 1], [2, 3, 4, 5]]}), "equal and even"),
    (lambda: ring_steps({}), "no cut"),
])  # fmt: skip
def test_mistakes_are_named(draw, message):
    with pytest.raises(ConfigError, match=message):
        draw()
