import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import RANKS
from minimegatron.viz.ring_reduce import replay, ring_steps, sends_in, sends_of, start_of
from tests.viz.reading import boxes, overlaps, words


def numbers(held):
    return [[block.value for block in row] for row in held]


def test_three_ranks_by_hand():
    start, first, second, third, last = map(numbers, replay(start_of(3), sends_of(3)))
    assert start == [[1, 2, 3], [10, 20, 30], [100, 200, 300]]
    assert first == [[1, 2, 303], [11, 20, 30], [100, 220, 300]]
    assert second == [[1, 222, 303], [11, 20, 333], [111, 220, 300]]
    assert third == [[111, 222, 303], [11, 222, 333], [111, 220, 333]]
    assert last == [[111, 222, 333]] * 3


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_a_ring_of_any_size_ends_with_the_sum_of_all_on_every_rank(size):
    states = replay(start_of(size), sends_of(size))
    assert len(states) == 2 * size - 1
    everyone = tuple(range(size))
    assert all(block.origins == everyone for row in states[-1] for block in row)
    finished = [[block.origins == everyone for block in row] for row in states[size - 1]]
    assert [sum(row) for row in finished] == [1] * size  # after the first half, one part on each rank
    assert sorted(row.index(True) for row in finished) == list(range(size))


def test_a_ring_that_begins_with_another_part_ends_with_the_same_sums():
    sends = [[(part + 1) % 3 for part in step] for step in sends_of(3)]
    assert numbers(replay(start_of(3), sends)[-1]) == [[111, 222, 333]] * 3


def test_the_picture_shows_every_number_that_every_rank_holds_in_every_column():
    figure = ring_steps()
    shown = sorted(int(word) for word in words(figure) if word.isdigit())
    assert shown == sorted(v for held in replay(start_of(3), sends_of(3)) for row in numbers(held) for v in row)
    assert not overlaps(figure)


def test_an_arrow_carries_the_letter_of_the_framed_part():
    figure = ring_steps()
    axes = figure.axes[0]
    frames = [p for p in axes.patches if not p.get_fill() and p.get_linewidth() > 2]
    assert len(frames) == 4 * 3
    letters = [t for t in axes.texts if t.get_text() in list("ABC") and t.get_position()[1] > 0]
    for frame, letter in zip(frames, letters, strict=True):
        x, y = frame.get_xy()
        assert letter.get_text() == "ABC"[round(x) % 5] and letter.get_position()[1] == pytest.approx(y + 0.5)


def test_a_sum_carries_the_colours_of_the_ranks_in_it():
    striped = {box.get_facecolor() for box in boxes(ring_steps(size=2))}
    assert len(striped) == 2 and len(set(RANKS[:2])) == 2


def test_the_formula_is_left_to_the_learner():
    assert not any("%" in word or "mod" in word for word in words(ring_steps()))


def test_parts_are_known_by_their_digits():
    messages = [[1.0, 303.0], [20.0, 11.0], [300.0, 220.0]]
    assert sends_in(messages) == sends_of(3)[:2]
    for wrong in (12.0, 0.0, float("nan")):
        with pytest.raises(ConfigError, match="no part"):
            sends_in([[wrong]])


def test_what_is_no_ring_is_refused():
    with pytest.raises(ConfigError, match="3 steps"):
        replay(start_of(3), sends_of(3)[:3])
    with pytest.raises(ConfigError, match="part 3 of 3"):
        ring_steps(sends=[[0, 1, 3], *sends_of(3)[1:]])
