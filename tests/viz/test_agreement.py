import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.agreement import agreement
from tests.viz.reading import overlaps, words

TABLES = {"first": {"1.7B": (100.0, 95.0), "7.5B": (120.0, 132.0)}, "second": {"70B": (400.0, 400.0)}}


def test_each_run_has_a_pair_of_bars_and_its_ratio():
    figure = agreement(TABLES, what="TFLOP/s a GPU", title="Two tables")
    first, second = figure.axes
    assert [bar.get_width() for bar in first.patches] == [100.0, 120.0, 95.0, 132.0]
    assert [bar.get_width() for bar in second.patches] == [400.0, 400.0]
    said = words(figure)
    assert {"x 0.95", "x 1.10", "x 1.00", "1.7B", "70B", "first", "second", "published", "predicted"} <= set(said)
    assert not overlaps(figure)


def test_nothing_to_draw_is_refused():
    for tables in ({}, {"first": {}}):
        with pytest.raises(ConfigError, match="no run"):
            agreement(tables, what="")
