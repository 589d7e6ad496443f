import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.sequence import causal_map, pairs_of
from tests.viz.reading import boxes, overlaps, words

CONTIGUOUS = [range(4 * r, 4 * r + 4) for r in range(4)]
ZIGZAG = [[2 * r, 2 * r + 1, 14 - 2 * r, 15 - 2 * r] for r in range(4)]


def test_pairs_are_those_of_a_causal_mask():
    assert pairs_of(CONTIGUOUS) == [10, 26, 42, 58]
    assert pairs_of(ZIGZAG) == [34] * 4


def test_each_row_has_the_colour_of_its_rank_and_the_width_of_what_it_sees():
    figure = causal_map({"zigzag": ZIGZAG})
    rows = boxes(figure)
    assert [row.get_width() for row in rows] == list(range(1, 17))
    colour = [row.get_facecolor() for row in rows]
    for tokens in ZIGZAG:
        assert len({colour[i] for i in tokens}) == 1
    assert len(set(colour)) == 4
    areas = [sum(rows[i].get_width() * rows[i].get_height() for i in tokens) for tokens in ZIGZAG]
    assert areas == pairs_of(ZIGZAG)


def test_a_rank_is_named_beside_each_run_of_its_rows():
    seen = words(causal_map({"contiguous": CONTIGUOUS, "zigzag": ZIGZAG}))
    # rank 3 holds the middle of a zigzag in one piece
    assert [seen.count(f"rank {r}") for r in range(4)] == [3, 3, 3, 2]
    assert "pairs of rank 0: 10  1: 26  2: 42  3: 58" in seen
    assert not overlaps(causal_map({"contiguous": CONTIGUOUS, "zigzag": ZIGZAG}))


def test_a_token_that_is_nowhere_or_twice_is_refused():
    with pytest.raises(ConfigError, match=r"hold \[0, 2\]"):
        causal_map({"torn": [[0], [2]]})
    with pytest.raises(ConfigError, match=r"hold \[0, 1, 1\]"):
        causal_map({"twice": [[0, 1], [1]]})
    with pytest.raises(ConfigError, match="no cut"):
        causal_map({})
