import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Annotation

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import COMM
from minimegatron.viz.regions import FEATURES, LAYER, NOTHING, TOKENS, WHOLE, border, regions
from tests.viz.reading import overlaps, words

SENT = {NOTHING: 0, "all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}  # in units of n (t-1)/t


def sent(cuts):
    return sum(SENT[text] for pair in zip(cuts, cuts[1:], strict=False) for text in border(*pair))


def test_both_ways_through_a_layer_send_the_same_on_their_borders():
    assert [sent(cuts) for cuts in LAYER.values()] == [8, 8]


def test_a_border_there_and_back_is_its_own_mirror():
    for cut in (WHOLE, TOKENS):
        forward, backward = border(cut, FEATURES)
        assert border(FEATURES, cut) == (backward, forward)
    assert border(TOKENS, TOKENS) == (NOTHING, NOTHING)


def test_dark_arrows_are_the_messages():
    for axes, cuts in zip(regions().axes, LAYER.values(), strict=True):
        arrows = [t for t in axes.texts if isinstance(t, Annotation)]
        dark = [a for a in arrows if to_hex(a.arrow_patch.get_edgecolor()) == COMM]
        messages = [text for pair in zip(cuts, cuts[1:], strict=False) for text in border(*pair) if text != NOTHING]
        assert (len(arrows), len(dark)) == (8, len(messages))


def test_tokens_are_cut_into_rows_and_features_into_columns():
    wide = [p for p in regions({"sp": [TOKENS, FEATURES]}, ["norm", "fc1"], ranks=4).axes[0].patches
            if hasattr(p, "get_width")]  # fmt: skip
    assert [(p.get_width(), p.get_height()) for p in wide] == [(1, 0.25)] * 4 + [(0.25, 1)] * 4


def test_the_legend_names_what_occurs():
    assert "whole on every rank" in words(regions())
    assert "whole on every rank" not in words(regions({"sp": LAYER["tensor and sequence parallelism"]}))
    assert not overlaps(regions())


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="no way"):
        regions({})
    with pytest.raises(ConfigError, match="cuts 2 parts of 5"):
        regions({"short": [WHOLE, FEATURES]})
    with pytest.raises(ConfigError, match="from whole to tokens"):
        border(WHOLE, TOKENS)
