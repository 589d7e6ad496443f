import subprocess
import sys

from matplotlib.colors import to_rgb

from minimegatron.viz.picture import (
    COMM,
    RANKS,
    WORK,
    bytes_text,
    colours,
    hatch,
    new_figure,
    rank_colours,
    styled,
    text_on,
)
from tests.viz.reading import overlaps


def test_a_picture_shows_itself_and_leaves_nothing_behind():
    script = """
import matplotlib
from matplotlib.colors import to_rgb
before = dict(matplotlib.rcParams)
from minimegatron.viz.mesh import rank_grid
png = rank_grid({"tp": 2, "dp": 2})._repr_png_()
assert png == rank_grid({"tp": 2, "dp": 2})._repr_png_(), "the same data is the same picture"
assert png.startswith(b"\\x89PNG") and len(png) > 2000
assert dict(matplotlib.rcParams) == before
import matplotlib.pyplot as plt
assert plt.get_fignums() == []
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_two_words_on_each_other_are_found():
    with styled():
        figure = new_figure(3, 2)
        axes = figure.subplots()
        axes.text(0.5, 0.5, "one")
        axes.text(0.52, 0.52, "two")
    assert overlaps(figure) == [("one", "two")]


def test_numbers_are_written_in_the_unit_that_suits_them():
    assert [bytes_text(n) for n in (0, 1023, 1024, 1536, 5 * 2**30)] == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "5 GiB"]


def test_colours_darken_and_their_text_stays_readable():
    for n in range(1, 9):
        light = [sum(int(c[i : i + 2], 16) * w for i, w in ((1, 0.30), (3, 0.59), (5, 0.11))) for c in colours(n)]
        assert light == sorted(light, reverse=True) and len(set(light)) == n
    assert text_on("#ffffff") != text_on("#000000")
    looks = [(colour, hatch(i)) for i, colour in enumerate(colours(32))]
    assert len(set(looks)) == 32, "more groups than colours are told apart by hatches"


def test_a_colour_has_one_meaning():
    assert not {*RANKS} & {*WORK.values(), COMM}, "a rank looks like a kind of work"
    assert len({*RANKS}) == 8 and all(rank_colours(n) == [*RANKS[:n]] for n in range(9)), "a rank changes its colour"
    assert rank_colours(9)[8] == RANKS[0] and hatch(8) != hatch(0), "rank 8 is told from rank 0 by its hatch"
    light = sorted(sum(c * w for c, w in zip(to_rgb(colour), (0.30, 0.59, 0.11), strict=True)) for colour in RANKS[:4])
    assert min(b - a for a, b in zip(light, light[1:], strict=False)) > 0.08, "a grey print mixes up four ranks"
