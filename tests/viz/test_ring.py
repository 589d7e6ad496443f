import pytest
from matplotlib.patches import Polygon, Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import rank_colours
from minimegatron.viz.ring import FULL, NONE, PART, quarters, ring_steps, seen
from minimegatron.viz.sequence import pairs_of
from tests.viz.reading import overlaps, words

ZIGZAG = [[2 * r, 2 * r + 1, 14 - 2 * r, 15 - 2 * r] for r in range(4)]
CONTIGUOUS = [list(range(4 * r, 4 * r + 4)) for r in range(4)]


def test_a_query_sees_itself_and_what_comes_before():
    assert seen([2, 3], [0, 1]) == FULL and seen([0, 1], [0, 1]) == PART and seen([0, 1], [2, 3]) == NONE


def test_with_zigzag_each_block_gives_two_quarters():
    assert quarters(ZIGZAG, 1, 0) == [[PART, NONE], [FULL, PART]]  # the own block
    assert quarters(ZIGZAG, 1, 1) == [[FULL, NONE], [FULL, NONE]]  # that of an earlier rank
    assert quarters(ZIGZAG, 1, 2) == [[NONE, NONE], [FULL, FULL]]  # that of a later rank


@pytest.mark.parametrize("held", [ZIGZAG, CONTIGUOUS])
def test_what_is_filled_is_the_work_of_the_ranks(held):
    """Up to the diagonal, which a triangle halves."""
    figure = ring_steps({"cut": held})
    area = 0.0
    for patch in figure.axes[0].patches:
        if patch.get_fill():
            area += 0.25 if isinstance(patch, Rectangle) else 0.125
    tokens = sum(map(len, held))
    assert area * len(held[0]) ** 2 == sum(pairs_of(held)) - tokens / 2


def test_a_cell_has_the_colour_of_the_blocks_owner():
    figure = ring_steps({"zigzag": ZIGZAG})
    [first] = [p for p in figure.axes[0].patches if isinstance(p, Polygon) and p.get_xy()[0].tolist() == [0, 0]]
    assert first.get_facecolor()[:3] == pytest.approx(
        tuple(int(rank_colours(1)[0][i : i + 2], 16) / 255 for i in (1, 3, 5))
    )
    assert words(figure).count("keys of 2") == 4
    assert "its colour: the rank that owns the keys" in figure.legends[0].get_title().get_text()
    assert not overlaps(ring_steps({"contiguous": CONTIGUOUS, "zigzag": ZIGZAG}))


def test_blocks_that_have_no_halves_are_refused():
    for held in ([[0], [1]], [[0, 1], [2, 3, 4, 5]], [[0, 1, 2]]):
        with pytest.raises(ConfigError, match="equal and even"):
            ring_steps({"cut": held})
    with pytest.raises(ConfigError, match="no cut"):
        ring_steps({})
