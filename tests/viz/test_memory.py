import pytest

from minimegatron.errors import ConfigError
from minimegatron.memory import Sample
from minimegatron.viz.memory import curves, over_time, ranks
from tests.viz.reading import overlaps, words

MIB = 2**20
STEP = [
    Sample(0.0, {"parameters": 2 * MIB}, ""),
    Sample(0.1, {"parameters": 2 * MIB, "activations": 3 * MIB}, "forward, forward unit 0"),
    Sample(0.2, {"parameters": 2 * MIB, "activations": 3 * MIB, "workspace": MIB}, "backward, backward unit 0"),
    Sample(0.3, {"parameters": 2 * MIB, "gradients": MIB}, "optimizer_step"),
]
OTHER = [Sample(0.0, {"parameters": MIB}, "")]


def test_a_panel_names_its_run_and_the_fullest_moment():
    figure = curves({"whole": STEP, "shards": OTHER})
    seen = words(figure)
    assert {"whole: 6 MiB", "shards: 1 MiB", "moments of a step\nfullest: backward, backward unit 0"} <= set(seen)
    assert "moments of a step" in seen, "where nothing has been said, nothing is written"
    markers = [line.get_xydata().tolist() for axes in figure.axes for line in axes.lines if line.get_marker() == "v"]
    assert markers == [[[2.0, 6.0]], [[0.0, 1.0]]]
    assert not overlaps(figure)


def test_five_runs_stand_in_two_rows_on_one_scale():
    figure = curves({f"stage {n}": STEP for n in range(5)})
    corners = [axes.get_position() for axes in figure.axes if axes.axison]
    assert len(corners) == 5 and len({round(corner.y0, 3) for corner in corners}) == 2
    assert figure.get_figwidth() < 11 and len({axes.get_ylim() for axes in figure.axes if axes.axison}) == 1
    assert not overlaps(figure)


def test_nothing_is_refused():
    with pytest.raises(ConfigError, match="memory of nothing"):
        curves({"whole": []})


def test_ranks_beside_each_other_against_what_there_is() -> None:
    peaks = {"rank 0": {"activations": 2**30, "parameters": 3 * 2**30}, "rank 1": {"parameters": 2 * 2**30}}
    figure = ranks(peaks, limit=8 * 2**30, title="Ranks")
    parameters, activations = figure.axes[0].containers
    assert [p.get_width() for p in parameters] == [3, 2] and [p.get_x() for p in activations] == [3, 2]
    assert {"GiB at the fullest moment of a step", "limit: 8", "4"} <= set(words(figure)) and not overlaps(figure)


def test_ranks_over_time_have_one_clock_and_one_scale() -> None:
    figure = over_time({"rank 0": STEP, "rank 4": [*OTHER, Sample(0.4, {"parameters": MIB})]}, limit=8 * MIB)
    seen = words(figure)
    assert {"rank 0: 6 MiB in backward, backward unit 0", "rank 4: 1 MiB", "time in ms; limit: 8 MiB", "limit"} <= set(
        seen
    )
    markers = [line.get_xydata().tolist() for axes in figure.axes for line in axes.lines if line.get_marker() == "v"]
    assert markers == [[[200.0, 6.0]], [[0.0, 1.0]]]
    assert len({axes.get_ylim() for axes in figure.axes}) == len({axes.get_xlim() for axes in figure.axes}) == 1
    assert not overlaps(figure)


def test_a_limit_far_away_leaves_room_for_what_there_is() -> None:
    figure = over_time({"rank 0": STEP}, limit=2**40)
    assert figure.axes[0].get_ylim()[1] < 7
    assert "time in ms; limit: 1 TiB, beyond the axis" in words(figure)
