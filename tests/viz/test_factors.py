import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.factors import factors, said
from tests.viz.reading import overlaps, words

COMPUTED = {"parameters": {"tp": 2.0, "pp": 1.87}, "state": {"tp": 1.0, "pp": 1.02}, "copies": {"tp": 0.5, "pp": 1.0}}


def test_a_factor_in_words():
    assert [said(n) for n in (2.0, 1.87, 1.02, 1.0, 0.99, 0.5, 4.0)] == ["÷ 2", "÷ 1.9", *["same"] * 3, "× 2", "÷ 4"]


def test_every_square_says_its_factor_and_what_was_predicted():
    predicted = {"parameters": {"tp": 2, "pp": 2}, "state": {"tp": 2}}
    figure = factors(COMPUTED, predicted, title="Doubled", what="the axis")
    texts = words(figure)
    assert texts.count("same") == 3 and texts.count("÷ 2") == 1 and texts.count("× 2") == 1
    assert texts.count("✔ predicted: ÷ 2") == 2 and texts.count("✘ predicted: ÷ 2") == 1
    assert {"parameters", "state", "copies", "tp", "pp", "the axis", "Doubled"} <= set(texts) and not overlaps(figure)
    assert len(figure.axes[0].patches) == 6
    shades = {patch.get_facecolor() for patch in figure.axes[0].patches}
    assert len(shades) == 3  # divided, the same, more


def test_without_a_prediction_nothing_is_said_of_one():
    assert not any("predicted" in text for text in words(factors(COMPUTED)))


def test_rows_must_have_the_same_columns():
    for rows in ({}, {"a": {}}, {"a": {"tp": 1.0}, "b": {"pp": 1.0}}):
        with pytest.raises(ConfigError, match="columns"):
            factors(rows)
