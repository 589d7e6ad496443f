import subprocess
import sys

import matplotlib

from minimegatron.viz.collective import before_after
from minimegatron.viz.picture import bytes_text, colours, hatch, new_figure, styled, text_on
from tests.viz.reading import overlaps


def test_a_picture_shows_itself_and_leaves_nothing_behind():
    script = """
import matplotlib
before = dict(matplotlib.rcParams)
from minimegatron.viz.collective import before_after
png = before_after("all_reduce", 2)._repr_png_()
assert png.startswith(b"\\x89PNG") and len(png) > 2000
assert dict(matplotlib.rcParams) == before
import matplotlib.pyplot as plt
assert plt.get_fignums() == []
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_same_data_is_the_same_picture():
    assert before_after("all_gather")._repr_png_() == before_after("all_gather")._repr_png_()


def test_the_style_ends_with_its_block():
    size = matplotlib.rcParams["font.size"]
    with matplotlib.rc_context({"font.size": 31}):
        with styled():
            assert matplotlib.rcParams["font.size"] < 31
        assert matplotlib.rcParams["font.size"] == 31
    assert matplotlib.rcParams["font.size"] == size


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
