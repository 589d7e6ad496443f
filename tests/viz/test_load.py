import pytest

from minimegatron.errors import ConfigError
from minimegatron.serving.load import Record, summarise
from minimegatron.viz.load import throughput_latency, ticks
from tests.viz.reading import overlaps, words


def point(rate, slow):
    """100 requests at `rate`, whose latencies are spread from `slow` to 3 x `slow`."""
    records = []
    for i in range(100):
        at, wait = i / rate, slow * (1 + i / 50)
        records.append(Record(at, at, [at + wait, at + wait * 1.2], at + wait * 1.2, 10, 2))
    return f"{rate:g}/s", summarise(records)


POINTS = [point(1, 0.05), point(2, 0.06), point(4, 0.1), point(8, 0.9)]


def test_a_point_a_run_with_its_name_and_the_deadlines():
    figure = throughput_latency(POINTS, {"ttft": 0.5, "tpot": 0.05})
    first, second, third = figure.axes
    lines = {line.get_label(): line for line in first.get_lines()}
    assert list(lines["p50"].get_xdata()) == [s["output_throughput"] for _, s in POINTS]
    assert list(lines["p50"].get_ydata()) == [s["p50_ttft_ms"] for _, s in POINTS]
    assert list(lines["p99"].get_ydata()) == [s["p99_ttft_ms"] for _, s in POINTS]
    assert set(lines["deadline"].get_ydata()) == {500.0}
    assert "deadline" not in {line.get_label() for line in third.get_lines()}
    for axes in (first, second, third):
        assert {"1/s", "2/s", "4/s", "8/s"} <= {text.get_text() for text in axes.texts}
    assert "output tokens a second" in words(figure) and not overlaps(figure)


def test_runs_without_an_answer_are_left_out_and_none_at_all_is_refused():
    failed = ("inf", summarise([Record(0.0, 0.0, [], 1.0, error="HTTP 429")]))
    figure = throughput_latency([*POINTS, failed])
    assert not {"inf"} & set(words(figure))
    with pytest.raises(ConfigError, match="none of 1 runs"):
        throughput_latency([failed])


def test_a_run_of_single_tokens_has_no_time_per_token():
    one = ("1/s", summarise([Record(0.0, 0.0, [0.5], 0.5, 3, 1)]))
    figure = throughput_latency([one])
    assert [len(axes.texts) for axes in figure.axes] == [1, 0, 1]


def test_ticks_are_round_and_within():
    assert ticks(2, 3000) == [10, 100, 1000]
    assert ticks(15, 120) == pytest.approx([20, 50, 100])
    assert {20, 30} <= {round(t, 6) for t in ticks(17, 31)} and all(17 <= t <= 31 for t in ticks(17, 31))
