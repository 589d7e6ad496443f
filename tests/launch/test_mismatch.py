"""The first mismatch of all ranks, by this package and by torch's own analyser of the same files."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.commands import flight_recorder as command
from minimegatron.errors import ConfigError
from minimegatron.launch import flight_dump
from minimegatron.launch.flight_calls import Records, table
from minimegatron.launch.mismatch import Finding, first_mismatch
from tests.launch.flight import Axes, all_recorded, for_ever, gathers, recorded, sums

Fault = Callable[[int, Axes], object]


def step(rank: int, axes: Axes, fault: Fault | None = None) -> None:
    """A step of training: two sums over tp, one over dp, a gather of all.

    With a fault, rank 1 does that after the first sum, and every rank waits in the first call that then lacks somebody.
    """
    sums(axes["tp"], 8)
    faulty = fault is not None and rank == 1
    if fault is not None and faulty and fault is not leaves_out:
        with for_ever():
            fault(rank, axes)
        return
    if not faulty:
        sums(axes["tp"], 4, stuck=fault is not None and rank == 0)
    sums(axes["dp"], 16, stuck=fault is not None)
    gathers(axes["world"])


def hangs(fault: Fault) -> Callable[[int, Axes], None]:
    """Three good steps and one with the fault."""

    def program(rank: int, axes: Axes) -> None:
        for number in range(4):
            step(rank, axes, fault if number == 3 else None)

    return program


def leaves_out(rank: int, axes: Axes) -> None:
    """`step` does it."""


def other_shape(rank: int, axes: Axes) -> None:
    sums(axes["tp"], 5)


def other_dtype(rank: int, axes: Axes) -> None:
    sums(axes["tp"], 4, torch.float64)


def other_call(rank: int, axes: Axes) -> None:
    gathers(axes["tp"], 4)


def comes_late(rank: int, axes: Axes) -> None:
    return


# fault -> (what ours finds, words of the line, the word of torch's analyser)
CASES = {
    other_shape: ("shape", ["all_reduce #8 over tp (ranks 0-1)", "[5]", "[4]"], "SIZE_OR_SYNTAX_MISMATCH"),
    other_dtype: ("dtype", ["all_reduce #8 over tp (ranks 0-1)", "float64", "float32"], "COLLECTIVE_DTYPE_MISMATCH"),
    other_call: ("operation", ["all_gather [4]", "all_reduce [4]", "#8 of tp"], "COLLECTIVE_TYPE_MISMATCH"),
    comes_late: ("missing", ["rank 1 did not come", "after all_reduce #7 over tp"], "missing ranks: {1}"),
}


@pytest.fixture
def analyser(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[[dict[int, Any]], str]:
    """What `torchfrtrace` says about dumps."""
    from torch.distributed.flight_recorder import fr_trace

    def say(dumps: dict[int, Any]) -> str:
        for dump in dumps.values():
            flight_dump.write(dump, tmp_path / "_dump_")
        caplog.clear()
        with caplog.at_level(logging.INFO, "Flight Recorder"):
            fr_trace.main([str(tmp_path)])
        return caplog.text

    return say


@pytest.mark.parametrize("fault", CASES, ids=lambda fault: fault.__name__)
def test_both_analysers_find_the_call_and_the_rank(fault: Fault, analyser: Any) -> None:
    dumps = all_recorded(hangs(fault))
    kind, words, torchs = CASES[fault]
    found = first_mismatch(Records(dumps))
    assert found.kind == kind and found.ranks == (1,), found
    assert all(word in found.text for word in [*words, "test_mismatch.py:"]), found.text
    assert torchs in analyser(dumps)


def test_a_run_without_a_fault_has_none_by_either(analyser: Any) -> None:
    dumps = all_recorded(lambda rank, axes: [step(rank, axes) for _ in range(4)])
    assert not first_mismatch(Records(dumps)) and "rror" not in analyser(dumps).replace("No errors", "")


def test_what_a_rank_left_out_is_named_by_what_it_did_in_earlier_steps() -> None:
    found = first_mismatch(Records(all_recorded(hangs(leaves_out))))
    assert found.kind == "left out" and found.ranks == (1,), found
    assert "left out all_reduce [4] float32 over tp" in found.text and "all_reduce #4 over dp" in found.text


def two_sums(first: str, second: str, n: int, m: int) -> Callable[[int, Axes], None]:
    def program(rank: int, axes: Axes) -> None:
        for _ in range(2):
            step(rank, axes)
        one, two = (lambda: sums(axes[first], n)), (lambda: sums(axes[second], m))  # two lines would tell them apart
        for call in (two, one) if rank == 2 else (one, two):
            call()
        sums(axes["world"], 3)

    return program


def test_another_order_of_two_calls_is_said_to_be_that() -> None:
    found = first_mismatch(Records(all_recorded(two_sums("world", "world", 8, 4))))
    assert found.kind == "order" and found.ranks == (2,), found


def swapped_lines(rank: int, axes: Axes) -> None:
    step(rank, axes)
    if rank == 3:
        sums(axes["world"], 8), sums_again(axes)
    else:
        sums_again(axes), sums(axes["world"], 8)


def sums_again(axes: Axes) -> None:
    sums(axes["world"], 8)


def test_equal_calls_from_two_lines_in_another_order_are_no_agreement() -> None:
    """gloo would add them up, and nothing would hang."""
    program: Any = lambda rank, axes: (step(rank, axes), in_order(rank, axes))  # noqa: E731
    found = first_mismatch(Records(all_recorded(program)))
    assert found.kind == "lines" and "world" in found.text, found


def in_order(rank: int, axes: Axes) -> None:
    calls = [first_line, second_line]
    for call in calls[::-1] if rank == 1 else calls:
        call(axes)


def first_line(axes: Axes) -> None:
    sums(axes["world"], 8)


def second_line(axes: Axes) -> None:
    sums(axes["world"], 8)


def test_a_call_over_another_group_is_named_with_both() -> None:
    def program(rank: int, axes: Axes) -> None:
        for _ in range(3):
            step(rank, axes)
        axis = axes["dp"] if rank == 1 else axes["tp"]
        with for_ever():
            sums(axis, 8)

    found = first_mismatch(Records(all_recorded(program)))
    assert found.kind == "group" and found.ranks == (1,), found
    assert "over dp" in found.text and "over tp" in found.text


def test_a_rank_that_left_no_record_is_the_one_that_did_not_come() -> None:
    dumps = all_recorded(hangs(comes_late))
    del dumps[1]
    found = first_mismatch(Records(dumps, 4))
    assert found == Finding("missing", found.text, (1,)) and "left no record" in found.text
    assert [row[:3:2] for row in table(Records(dumps, 4))][2] == ("1", "no record")


def test_a_buffer_that_is_full_hides_no_mismatch_that_is_in_it() -> None:
    found = first_mismatch(Records(all_recorded(hangs(other_shape), size=4)))
    assert found.kind == "shape" and found.ranks == (1,)


def test_of_a_rank_that_was_killed_the_last_calls_are_read_from_memory() -> None:
    from minimegatron.comm.async_ops import alone
    from minimegatron.comm.flight_recorder import FlightRecorder
    from minimegatron.comm.last_calls import Page
    from tests.launch import flight

    dumps = all_recorded(hangs(other_shape))
    recorder = FlightRecorder(100)
    with alone(flight.Silent(), recorder):
        try:
            hangs(other_shape)(1, flight.axes(1))
        except flight.Waits:
            pass
    assert recorder.last is not None
    dumps[1] = flight_dump.of_page(Page(recorder.last.where), 1, 4, "it was killed")
    assert len(dumps[1]["entries"]) <= 16
    found = first_mismatch(Records(dumps))
    assert found.kind == "shape" and found.ranks == (1,) and "rank 1 calls it with [5]" in found.text


# ---------------------------------------------------------------------------------------------------- files, command


def test_the_command_reads_ours_and_torchs_and_says_it_again(tmp_path: Path, capsys: Any) -> None:
    dumps = all_recorded(hangs(other_call))
    for dump in dumps.values():
        flight_dump.write(dump, tmp_path / "_dump_")
    assert command.main([str(tmp_path), "--last", "1"]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == f"first mismatch: {first_mismatch(Records(dumps)).text}"
    assert len([line for line in printed.splitlines() if line[:1].isdigit()]) == 4
    for path in tmp_path.glob("*.json"):
        path.unlink()
    assert command.main([str(tmp_path)]) == 1, "from the pickles alone, of which nothing is executed"
    assert capsys.readouterr().out.splitlines()[0] == printed.splitlines()[0]


def test_a_file_that_would_execute_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "_dump_0").write_bytes(b"cos\nsystem\n(S'echo owned'\ntR.")
    with pytest.raises(ConfigError, match=r"posix\.system|os\.system"):
        command.main([str(tmp_path)])
    with pytest.raises(ConfigError, match="holds no flight records"):
        command.main([str(tmp_path / ".." / "nowhere")]) if False else command.read(_empty(tmp_path))


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def test_a_ring_shift_is_two_messages_to_torch(analyser: Any) -> None:
    from minimegatron.comm.ring import Shift

    def program(rank: int, axes: Axes) -> None:
        for _ in range(2):
            Shift(torch.zeros(4), axes["world"]).wait()

    dumps = all_recorded(program)
    assert not first_mismatch(Records(dumps)) and "rror" not in analyser(dumps)
    names = [entry["profiling_name"] for entry in flight_dump.for_torch(dumps[3])["entries"]]
    assert names == ["gloo:send 1->0", "gloo:recv 1<-0"] * 2


def test_what_is_written_is_plain_data_with_torchs_fields(tmp_path: Path) -> None:
    """The fields of `torch._C._distributed_c10d._dump_fr_trace()` of torch 2.13, as gloo fills them."""
    flight_dump.write(recorded(0, step), tmp_path / "_dump_")
    read = pickle.loads((tmp_path / "_dump_0").read_bytes())
    assert {"version", "pg_config", "pg_status", "comm_lib_version", "entries"} <= read.keys()
    entry = read["entries"][2]
    assert {
        "record_id", "pg_id", "process_group", "thread_name", "thread_id", "collective_seq_id", "p2p_seq_id", "op_id",
        "profiling_name", "time_created_ns", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "state",
        "time_discovered_started_ns", "time_discovered_completed_ns", "retired", "timeout_ms", "is_p2p", "frames",
    } <= entry.keys()  # fmt: skip
    assert (entry["profiling_name"], entry["input_sizes"], entry["input_dtypes"]) == (
        "gloo:all_reduce",
        [[16]],
        ["Float"],
    )
    assert (entry["state"], entry["collective_seq_id"], entry["is_p2p"]) == ("completed", 1, False)
    assert entry["frames"][2]["name"] == "sums" or "sums" in [frame["name"] for frame in entry["frames"]]
