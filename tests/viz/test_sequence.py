import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.sequence import causal_map, heads_for_tokens, pairs_of
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
    assert "pairs (query, key) of rank 0: 10  1: 26  2: 42  3: 58" in seen
    assert seen.count("keys: as many as the query sees") == seen.count("queries, first at the top") == 2
    assert not overlaps(causal_map({"contiguous": CONTIGUOUS, "zigzag": ZIGZAG}))


def test_a_token_that_is_nowhere_or_twice_is_refused():
    with pytest.raises(ConfigError, match=r"hold \[0, 2\]"):
        causal_map({"torn": [[0], [2]]})
    with pytest.raises(ConfigError, match=r"hold \[0, 1, 1\]"):
        causal_map({"twice": [[0, 1], [1]]})
    with pytest.raises(ConfigError, match="no cut"):
        causal_map({})


CHUNKS = [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_chunks_arrive_rank_by_rank_and_are_sorted():
    figure = heads_for_tokens(4, CHUNKS)
    first_rows = [[b.get_x() for b in boxes_of(axes)][:8] for axes in figure.axes]
    assert first_rows == [list(range(8))] * 3
    orders = [[text for text in numbers_of(axes)][:8] for axes in figure.axes]
    assert orders == [["0", "7", "1", "6", "2", "5", "3", "4"]] * 2 + [[str(i) for i in range(8)]]


def test_the_frames_turn_from_columns_to_rows():
    def frames(axes):
        return [p.get_bbox().bounds for p in axes.patches if not p.get_fill()]

    before, arrived, in_order = map(frames, heads_for_tokens(8, CHUNKS).axes)
    assert before == [(2 * r, 0, 2, 8) for r in range(4)]
    assert arrived == in_order == [(0, 2 * r, 8, 2) for r in range(4)]


def test_a_chunk_keeps_the_colour_of_the_rank_that_had_it_first():
    before, _, after = heads_for_tokens(4, CHUNKS).axes
    of = dict(zip(numbers_of(before)[:8], [b.get_facecolor() for b in boxes_of(before)][:8], strict=True))
    assert [b.get_facecolor() for b in boxes_of(after)][:8] == [of[str(i)] for i in range(8)]
    assert of["0"] == of["7"] and len(set(of.values())) == 4
    assert not overlaps(heads_for_tokens(4, CHUNKS))


def test_heads_and_chunks_that_cannot_be_shared_are_refused():
    for heads, held in ((3, [[0], [1]]), (2, [[0], [2]]), (0, [[0]]), (2, [])):
        with pytest.raises(ConfigError, match="heads and chunks"):
            heads_for_tokens(heads, held)


def boxes_of(axes):
    return [p for p in axes.patches if p.get_fill()]


def numbers_of(axes):
    return [t.get_text() for t in axes.texts if t.get_text().isdigit()]
