import pytest
from matplotlib.colors import to_hex

from minimegatron.errors import ConfigError
from minimegatron.viz.cuda import ACTIVE, PASSIVE, SHARED
from minimegatron.viz.reduction import butterfly, butterfly_steps, reduction_tree, tree_steps
from tests.viz.reading import boxes, overlaps, words

VALUES = [3, 1, 4, 1, 5, 9, 2, 6]


def arrows(figure):
    """(column of the number, column of the sum, row of the sum) of each line that leads from one to the other."""
    notes = [t for t in figure.axes[0].texts if getattr(t, "arrow_patch", None) is not None]
    return {(int(t.xyann[0]), int(t.xy[0]), round((0.62 - t.xy[1]) / 1.7)) for t in notes}


def test_a_tree_halves_the_threads_that_add_and_thread_0_has_the_sum():
    assert tree_steps(VALUES) == [VALUES, [8, 10, 6, 7, 5, 9, 2, 6], [14, 17, 6, 7, 5, 9, 2, 6],
                                  [31, 17, 6, 7, 5, 9, 2, 6]]  # fmt: skip
    figure = reduction_tree(VALUES)
    colours = [to_hex(box.get_facecolor()) for box in boxes(figure)]
    assert (colours.count(SHARED), colours.count(ACTIVE), colours.count(PASSIVE)) == (8, 4 + 2 + 1, 4 + 6 + 7)
    across = {(a, b, step) for a, b, step in arrows(figure) if a != b}
    assert across == {(4, 0, 1), (5, 1, 1), (6, 2, 1), (7, 3, 1), (2, 0, 2), (3, 1, 2), (1, 0, 3)}
    seen = words(figure)
    assert seen.count("__syncthreads()") == 4 and seen.count("31") == 1
    assert {"s = 4: 4 threads add", "s = 1: 1 thread adds", "thread 7"} <= set(seen)
    assert not overlaps(figure)


def test_a_butterfly_keeps_all_lanes_busy_and_all_have_the_sum():
    assert butterfly_steps(VALUES)[1] == [8, 10, 6, 7] * 2 and butterfly_steps(VALUES)[-1] == [31] * 8
    figure = butterfly(VALUES)
    colours = [to_hex(box.get_facecolor()) for box in boxes(figure)]
    assert (colours.count(SHARED), colours.count(ACTIVE), colours.count(PASSIVE)) == (8, 24, 0)
    across = {(a, b, step) for a, b, step in arrows(figure) if a != b}
    assert across == {(i ^ o, i, step) for step, o in ((1, 4), (2, 2), (3, 1)) for i in range(8)}
    assert words(figure).count("31") == 8 and "__syncthreads()" not in words(figure)
    assert not overlaps(figure)


def test_what_cannot_be_halved_is_refused():
    for steps in (tree_steps, butterfly_steps):
        with pytest.raises(ConfigError, match="6 numbers"):
            steps([1.0] * 6)
        with pytest.raises(ConfigError, match="0 numbers"):
            steps([])
