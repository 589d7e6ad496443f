import pytest
from matplotlib.colors import to_rgba

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import RANKS
from minimegatron.viz.stream import who_reads
from tests.viz.reading import boxes, overlaps, words

BEFORE = [[[4, 1], [0, 3]]]
AFTER = [[[2], [3], [1], [4]]]


def test_every_id_stands_in_the_colour_of_the_rank_that_reads_it():
    figure = who_reads([("2 ranks", BEFORE), ("4 ranks", AFTER)], 5)
    drawn = boxes(figure)[:8]
    assert [RANKS.index(c) for b in drawn for c in RANKS if to_rgba(c) == b.get_facecolor()] == [0, 0, 1, 1, 0, 1, 2, 3]
    assert [int(w) for w in words(figure) if w.isdigit()] == [4, 1, 0, 3, 2, 3, 1, 4]
    assert [w for w in words(figure) if w.startswith("rank ")] == [f"rank {r}" for r in range(4)]
    assert [w for w in words(figure) if w.startswith("step ")] == ["step 0", "step 1"]
    assert any("id of a sample" in w for w in words(figure)) and not overlaps(figure)


def test_an_epoch_ends_after_num_samples_places_of_all_rows_together():
    figure = who_reads([("2 ranks", BEFORE), ("4 ranks", AFTER)], 5)
    ends = [line.get_xdata()[0] for line in figure.axes[0].lines]
    assert ends == [1]  # 4 places in the first row, then 1 in the second


def test_no_sample_is_refused():
    with pytest.raises(ConfigError, match="no rank reads"):
        who_reads([("empty", [[[], []]])], 5)
