import pytest
from matplotlib.colors import to_hex

from course.figures.inference import block_tables, pages_over_time, rows_of_steps, seats, shares, tokens_per_second
from minimegatron.errors import ConfigError
from minimegatron.viz.picture import PAPER, REFERENCE, rank_colours
from tests.viz.reading import boxes, overlaps, words


def filled(figure, but):
    """(column, row) of every cell that has another colour."""
    return {(p.get_x(), p.get_y()) for p in boxes(figure) if to_hex(p.get_facecolor()) != to_hex(but)}


def test_a_table_names_pages_and_the_memory_says_whose_token_lies_where():
    figure = block_tables({"a": [3, 0], "b": [1]}, {"a": 5, "b": 2}, pages=4, size=4)
    left, right = figure.axes
    assert [t.get_text() for t in left.texts] == ["a", "3", "0", "b", "1"]
    rows = [t.get_text() for t in right.texts if not t.get_text().startswith("page")]
    assert [text for text in rows if text] == ["a4", "b0", "b1", "a0", "a1", "a2", "a3"]
    assert len(right.patches) == 16 and not overlaps(figure)


def test_a_page_has_the_colour_and_the_name_of_its_owners():
    figure = pages_over_time([{"a": [1]}, {"a": [1, 2], "b": [2]}], 3)
    assert filled(figure, PAPER) == {(0, 1), (1, 1), (1, 2)}
    seen = words(figure)
    assert seen.count("a") == 2 and seen.count("ab") == 1, "two owners of one page are both named"


def test_a_step_is_as_high_as_its_tokens_and_prompts_are_hatched():
    steps = [[("a", 3, False), ("b", 1, False)], [("a", 1, True), ("b", 3, False)], [("b", 2, True)]]
    figure = rows_of_steps(steps, 4)
    parts = [(p.get_x(), p.get_y(), p.get_height(), bool(p.get_hatch())) for p in boxes(figure)]
    first, second = [(0, 0, 3, True), (0, 3, 1, True)], [(1, 0, 1, False), (1, 1, 3, True)]
    assert parts == [*first, *second, (2, 0, 2, True)], "also one token of a prompt, and an answer that is read again"
    [line] = figure.axes[0].lines
    assert list(line.get_ydata()) == [4, 4]


def test_a_sequence_keeps_its_seat_and_an_empty_one_is_grey():
    figure = seats({"one": [["a", "b"], ["b"], ["b", "c"]], "two": [["a"]]}, 2)
    first, second = figure.axes
    looks = {(p.get_x(), p.get_y()): to_hex(p.get_facecolor()) for p in first.patches}
    a, b, c = rank_colours(3)
    grey = to_hex(REFERENCE[0])
    assert looks == {(0, 0): a, (0, 1): b, (1, 0): grey, (1, 1): b, (2, 0): c, (2, 1): b}
    assert len(second.patches) == 2 and not overlaps(figure)


def test_shares_stand_side_by_side_and_rates_on_two_logarithmic_axes():
    figure = shares({"p": [0.25, 0.75], "q": [0.5, 0.5]})
    assert [bar.get_height() for bar in figure.axes[0].patches] == [0.25, 0.75, 0.5, 0.5]
    figure = tokens_per_second([1, 2], [10.0, 20.0], [5.0, 9.0], limits={"FLOPs": [30.0, 30.0]})
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[30.0, 30.0], [10.0, 20.0], [5.0, 9.0]]
    assert {"predicted", "measured", "FLOPs"} <= {*words(figure)} and figure.axes[0].get_yscale() == "log"


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: block_tables({}, {}, 2, 2), "no table"),
    (lambda: block_tables({"a": [2]}, {"a": 1}, 2, 2), "does not have"),
    (lambda: block_tables({"a": [1]}, {"a": 3}, 2, 2), "too few pages"),
    (lambda: pages_over_time([{}], 3), "no step"),
    (lambda: rows_of_steps([[]], 3), "no step"),
    (lambda: seats({"one": [["a", "b"]]}, 1), "more than 1"),
    (lambda: shares({"p": [1.0], "q": [0.5, 0.5]}), "the same tokens"),
    (lambda: tokens_per_second([1, 2], [1.0]), "a point for each"),
])  # fmt: skip
def test_mistakes_are_named(draw, message):
    with pytest.raises(ConfigError, match=message):
        draw()
