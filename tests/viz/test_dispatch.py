import itertools

import pytest
import torch

from minimegatron.errors import ConfigError
from minimegatron.viz.dispatch import dispatch_steps, journey
from minimegatron.viz.picture import COMM
from tests.viz.reading import boxes, overlaps, words


def chosen(*experts, of=4):
    """A map from the experts of each token."""
    return [[e in some for e in range(of)] for some in experts]


MAPS = [chosen((1, 2), (1, 3), (1, 3)), chosen((0, 1), (0, 2), (0, 1))]
IDLE = [chosen((0, 1), (0, 1)), chosen((0, 1), (1,))]


def named(rows):
    return [" ".join(row.name for row in of) for of in rows]


def test_rows_leave_by_expert_come_by_sender_and_work_by_expert():
    way = journey(MAPS)
    assert way.tokens == [["a", "b", "c"], ["d", "e", "f"]]
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
    maps = [(torch.rand(4, 2 * world, generator=draw) > 0.5).tolist() for _ in range(world)]
    way = journey(maps)
    everything = sorted(itertools.chain(*named(way.leaving)))
    assert everything == sorted(itertools.chain(*named(way.arriving))) == sorted(itertools.chain(*named(way.working)))
    for i, j in itertools.product(range(world), repeat=2):
        assert way.input_splits(i)[j] == way.output_splits(j)[i]
    assert [[row.expert for row in rows] for rows in way.working] == [
        sorted(row.expert for row in rows) for rows in way.arriving
    ]


def test_each_line_of_the_picture_holds_the_rows_of_that_step_in_the_colour_of_their_origin():
    figure = dispatch_steps(MAPS)
    squares, way = boxes(figure), journey(MAPS)
    lines = [[s for s in squares if s.get_y() == y] for y in sorted({s.get_y() for s in squares})]
    assert [len(line) for line in lines] == [6, 12, 12, 12]
    colour = dict(zip("abcdef", (s.get_facecolor() for s in sorted(lines[0], key=lambda s: s.get_x())), strict=True))
    assert len(set(colour.values())) == 2
    for line, rows in zip(lines[1:], (way.leaving, way.arriving, way.working), strict=True):
        in_order = [s.get_facecolor() for s in sorted(line, key=lambda s: s.get_x())]
        assert in_order == [colour[row.token] for of in rows for row in of]


def test_dark_lines_are_the_rows_that_change_their_rank():
    (axes,) = dispatch_steps(MAPS).axes
    way = journey(MAPS)
    moving = sum(row.origin != rank for rank, rows in enumerate(way.arriving) for row in rows)
    assert sum(line.get_color() == COMM for line in axes.lines) == moving == 8


def test_counts_splits_and_the_names_of_the_steps_are_said_once_for_each_rank():
    seen = words(dispatch_steps(MAPS))
    for text in (
        "counts [0, 3, 1, 2]   input splits [3, 3]", "blocks [[0, 3], [3, 2]]   output splits [3, 5]",
        "rows of each expert [3, 5]", "rank 0 holds experts 0, 1", "all-to-all", "regroup", "unpermute: add",
    ):  # fmt: skip
        assert seen.count(text) == 1, text
    assert not overlaps(dispatch_steps(MAPS))


def test_a_rank_that_gets_nothing_is_drawn_as_such():
    figure = dispatch_steps(IDLE)
    assert words(figure).count("no rows") == 2 and not overlaps(figure)


def test_what_is_no_dispatch_is_refused():
    with pytest.raises(ConfigError, match=r"over 3 ranks whose maps are \[4\] wide"):
        journey([*MAPS, chosen((0, 1))])
    with pytest.raises(ConfigError, match=r"are \[2, 4\] wide"):
        journey([chosen((0, 1)), chosen((0, 1), of=2)])
    with pytest.raises(ConfigError, match="over 0 ranks"):
        journey([])
    with pytest.raises(ConfigError, match="28 tokens for 26 letters"):
        journey([chosen(*[(0,)] * 14), chosen(*[(0,)] * 14)])
