"""One trace of all ranks: one clock, both ends of every arrow, and bounds that are said."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minimegatron.commands import trace as command
from minimegatron.errors import ConfigError
from minimegatron.viz.merged_trace import merge, problems, timeline

HOUR = 3600 * 10**9


def call(begin: int, end: int, number: int, ranks: tuple[int, ...] = (0, 1), **fields: Any) -> dict[str, Any]:
    base = {
        "process_group": ("0", "dp"), "ranks": list(ranks), "collective_seq_id": number, "p2p_seq_id": 0,
        "is_p2p": False, "op": "all_reduce", "axis": "dp", "profiling_name": "gloo:all_reduce",
        "time_created_ns": begin, "time_wait_ns": (begin + end) // 2, "time_discovered_completed_ns": end,
        "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"], "place": "h.py:1 in main",
    }  # fmt: skip
    return base | fields


def message(begin: int, end: int, number: int, op: str) -> dict[str, Any]:
    return call(begin, end, 0, is_p2p=True, p2p_seq_id=number, op=op, process_group=("pp:0->1", "pp"))


def line(rank: int, calls: list[dict[str, Any]], offset: int = 0, spans: tuple = ()) -> dict[str, Any]:
    events = [SimpleNamespace(name=n, kind="compute", start=a / 1e9, end=b / 1e9, note="") for n, a, b in spans]
    return timeline(rank, f"host{rank}", events, calls, -offset, offset)


@pytest.fixture
def two() -> list[dict[str, Any]]:
    """Two ranks; the clock of the second is an hour behind."""
    first = [call(1000, 9000, 1), call(2000, 8000, 2), message(3000, 4000, 1, "deliver F0 to rank 1")]
    second = [call(5000, 9500, 1), call(6000, 8500, 2), message(1000, 7000, 1, "receive F0 from rank 0")]
    for one in second:
        for name in ("time_created_ns", "time_wait_ns", "time_discovered_completed_ns"):
            one[name] -= HOUR
    spans = (("forward", 0, 5000), ("data", 100, 900), ("backward", 5000, 9900))
    return [line(0, first, spans=spans), line(1, second, HOUR, spans)]


def slices(trace: dict[str, Any], rank: int) -> dict[str, tuple[float, float]]:
    return {e["name"]: (e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == rank}


def test_one_clock_and_an_arrow_with_both_ends_for_each_communication(two: Any) -> None:
    trace = merge(two)
    assert problems(trace) == []
    assert slices(trace, 0)["all_reduce #1 over dp"] == (1.0, 8.0)
    assert slices(trace, 1)["all_reduce #1 over dp"] == (5.0, 4.5), "an hour was added"
    assert slices(trace, 0)["forward"] == slices(trace, 1)["forward"] == (0.0, 5.0)
    flows = [e for e in trace["traceEvents"] if e["ph"] in "stf"]
    assert len(flows) == 6 and trace["otherData"]["flows_left_out"] == 0
    sent, received = [e for e in flows if e["name"] == "message"]
    assert (sent["ph"], sent["pid"], sent["ts"]) == ("s", 0, 3.0) and (received["pid"], received["ts"]) == (1, 7.0)


def test_an_arrow_without_all_its_ends_is_left_out_and_counted(two: Any) -> None:
    two[1]["calls"] = two[1]["calls"][:1]
    trace = merge(two)
    assert problems(trace) == [] and trace["otherData"]["flows_left_out"] == 2
    assert len([e for e in trace["traceEvents"] if e["ph"] == "s"]) == 1


def test_what_does_not_fit_is_left_out_the_shortest_of_torchs_first(two: Any) -> None:
    ops = [
        {"ph": "X", "cat": "cpu_op", "name": f"op{n}", "pid": 9, "tid": 9, "ts": 10.0 * n, "dur": n} for n in range(9)
    ]
    python = {"ph": "X", "cat": "python_function", "name": "f", "pid": 9, "tid": 9, "ts": 0, "dur": 99}
    own = len(slices(merge(two), 0)) + len(slices(merge(two), 1)) + 4  # of six waits two have another's name
    trace = merge(two, {0: {"traceEvents": [*ops, python], "baseTimeNanoseconds": 0}}, own + 2)
    assert problems(trace) == []
    assert {name for name in slices(trace, 0) if name.startswith("op")} == {"op7", "op8"}
    assert trace["otherData"]["slices_left_out"] == 7
    late = [{"ph": "X", "cat": "cpu_op", "name": n, "pid": 9, "tid": 9, "ts": t, "dur": 5} for t, n in enumerate("ab")]
    assert problems(merge(two, {0: {"traceEvents": late}})) == [], "what is asynchronous ends after what began it"
    trace = merge(two, largest=5)
    assert problems(trace) == [] and trace["otherData"]["slices_left_out"] == own - 5


def test_the_check_finds_what_a_viewer_would_draw_wrong(two: Any) -> None:
    good = merge(two)

    def broken(change: Any) -> list[str]:
        trace = copy.deepcopy(good)
        change(trace["traceEvents"])
        return problems(trace)

    def without(phase: str) -> Any:
        return lambda events: events.remove(next(e for e in events if e["ph"] == phase))

    assert broken(without("s")) and broken(without("f"))
    assert broken(lambda events: next(e for e in events if e["ph"] == "X").update(dur=-1.0))
    assert broken(lambda events: next(e for e in events if e["ph"] == "f").update(ts=1e9))
    assert broken(lambda events: next(e for e in events if e["name"] == "data").update(dur=7.0)), "it does not nest"


def test_the_command_merges_a_folder(two: Any, tmp_path: Path, capsys: Any) -> None:
    for one in two:
        (tmp_path / f"rank{one['rank']}_steps1-3.timeline.json").write_text(json.dumps(one))
    assert command.main([str(tmp_path)]) == 0
    assert "ranks 0-1" in capsys.readouterr().out
    trace = json.loads(gzip.decompress((tmp_path / "merged.json.gz").read_bytes()))
    assert problems(trace) == [] and len(trace["traceEvents"]) > 20
    (tmp_path / "rank1_steps1-3.timeline.json").write_text('{"timeline": ')
    with pytest.raises(ConfigError, match="is no JSON"):
        command.main([str(tmp_path)])
    with pytest.raises(ConfigError, match="no timelines"):
        command.main([str(tmp_path / "none")])
