import pytest
import torch

from minimegatron.errors import ConfigError
from minimegatron.viz.numbers import error_bars, number_lines, numbers_of
from tests.viz.reading import overlaps, words

E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)


@pytest.mark.parametrize(("format", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_the_numbers_are_those_of_torchs_dtype(format, dtype):
    every = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    assert numbers_of(format, 0.0, format[2]) == sorted(every[every.isfinite()].tolist())


def test_a_mark_stands_at_each_number():
    figure = number_lines({"E4M3": E4M3, "E5M2": E5M2}, [(1, 4), (0, 2**-5)])
    marks = [[list(line.get_xdata()) for line in axes.lines if line.get_marker() == "|"] for axes in figure.axes]
    assert marks[0][1] == [1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4]
    assert [len(row) for row in marks[0]] == [17, 9]
    assert marks[1][0][:3] == [0, 2**-9, 2**-8]
    assert {"E4M3", "E5M2"} <= set(words(figure)) and not overlaps(figure)
    with pytest.raises(ConfigError, match="no number from 500"):
        number_lines({"E4M3": E4M3}, [(500, 600)])


def test_each_error_is_a_bar_with_its_value():
    figure = error_bars(["as before", "grown"], {"delayed": [0.026, 0.8], "current": [0.026, 0.025]}, "Errors")
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == [0.026, 0.8, 0.026, 0.025] and figure.axes[0].get_yscale() == "log"
    assert {"80.0%", "2.5%", "as before", "delayed", "Errors"} <= set(words(figure))
    assert not overlaps(figure)
    with pytest.raises(ConfigError, match="cannot be drawn"):
        error_bars(["one"], {"delayed": [0.0]})
    with pytest.raises(ConfigError, match="0 recipes"):
        error_bars(["one"], {})
