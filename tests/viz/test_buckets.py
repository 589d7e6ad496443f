import pytest

from minimegatron.errors import ConfigError
from minimegatron.parallel.data.buckets import bucket_layout
from minimegatron.viz.buckets import buffer_strip, gaps, straddling
from tests.viz.reading import boxes, overlaps, words

# Megatron's: a 0-10 of bucket 1 at 384, b at 256-356, c at 64-134, d at 0-5.
LAYOUT = bucket_layout([10, 100, 70, 5], 120, 2)
NAMES = ["a", "b", "c", "d"]


def spans(figure, pattern=None):
    found = [b for b in boxes(figure) if (b.get_hatch() == pattern if pattern else not b.get_hatch())]
    return [(round(b.get_x()), round(b.get_x() + b.get_width())) for b in found]


def test_padding_is_what_no_parameter_has():
    assert gaps(LAYOUT) == [(5, 64), (134, 256), (356, 384), (394, 512)]
    assert spans(buffer_strip(LAYOUT, NAMES), "////") == [(5, 64), (134, 256), (356, 384), (394, 512)]
    assert gaps(bucket_layout([10, 100], None)) == []
    assert "padding" not in words(buffer_strip(bucket_layout([10, 100], None)))


def test_a_parameter_on_a_border_has_the_colours_of_both_owners():
    assert straddling(LAYOUT) == {2}, "c lies at 64-134, and rank 1's shard begins at 128"
    figure = buffer_strip(LAYOUT, NAMES)
    pieces = [b for b in boxes(figure) if not b.get_hatch()]
    colour = {(round(b.get_x()), round(b.get_x() + b.get_width())): b.get_facecolor() for b in pieces}
    assert set(colour) == {(0, 5), (64, 128), (128, 134), (256, 356), (384, 394)}
    assert colour[64, 128] == colour[0, 5] == colour[256, 356] != colour[128, 134] == colour[384, 394]
    bold = [t.get_text() for t in figure.axes[0].texts if t.get_weight() == "bold"]
    assert bold == ["c"]


def test_names_buckets_and_owners_are_written_and_lie_apart():
    numels = [8192, 64, 12288, 192, 4096, 64, 64, 16384, 256, 16384, 64]
    names = [f"layers.0.{i}.weight" for i in range(len(numels))]
    figure = buffer_strip(bucket_layout(numels, 16000, 4), names)
    seen = words(figure)
    assert {*names, "bucket 0: 16,512 elements", "rank 3", "owned by rank 2"} <= set(seen)
    assert not overlaps(figure) and not overlaps(buffer_strip(LAYOUT, NAMES))


def test_a_buffer_that_is_not_cut_belongs_to_every_rank():
    seen = words(buffer_strip(bucket_layout([10, 100], 50), ["a", "b"]))
    assert "on every rank" in seen and not any("rank 0" in text for text in seen)


def test_names_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="3 names for 4 parameters"):
        buffer_strip(LAYOUT, ["a", "b", "c"])
    with pytest.raises(ConfigError, match="in 0 elements"):
        buffer_strip(bucket_layout([], None))
