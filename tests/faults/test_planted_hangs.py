"""Faults of order and of time, planted in real runs over gloo: the tools name the rank and the place."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from labkit.ranks.torchrun import launch
from minimegatron.commands import flight_recorder as command
from minimegatron.launch.flight_calls import Records
from minimegatron.launch.mismatch import first_mismatch
from tests.faults import helpers, planted

PLANTED = helpers.VICTIM.with_name("planted.py")
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --vocab-size 64 --seq-length 16 --lr 1e-3 --mock-data"

# ---------------------------------------------------------------------------------------- order, on warm ranks

# fault -> (kinds of finding that are right, ranks that may be named, words of the line)
ORDER: dict[str, tuple[tuple[str, ...], set[tuple[int, ...]], list[str]]] = {
    "left out": (("left out",), {(1,)}, ["left out all_reduce [100] float32 over dp", "in reduce_gradients"]),
    "order": (("order",), {(1,)}, ["another order", "in step"]),
    "group": (("group",), {(1,)}, ["over tp", "over dp", "in reduce_gradients"]),
    "operation": (("operation",), {(1,)}, ["all_gather [100]", "all_reduce [100]", "in reduce_gradients"]),
    "lines": (("lines",), {(0, 1), (1, 2), (1, 3)}, ["in first_line", "in second_line"]),
    planted.STUCK: (("missing",), {(1,)}, ["rank 1 did not come", "rank 1 is at planted.py"]),
    "receive": (("circle", "order", "operation"), {(0, 2), (2,), (2, 0)}, ["message #12", "in messages"]),
}


@pytest.mark.parametrize("fault", [
    pytest.param(fault, marks=() if fault in ("left out", "group") else pytest.mark.thorough) for fault in ORDER
])  # fmt: skip
def test_the_records_of_four_ranks_name_the_rank_and_the_line(ranks: Any, tmp_path: Path, fault: str) -> None:
    dumps = ranks(4, fingerprints=False).run(planted.on_warm_ranks, fault, str(tmp_path), timeout=60)
    found = first_mismatch(Records(dict(enumerate(dumps))))
    kinds, named, words = ORDER[fault]
    assert found.kind in kinds and found.ranks in named, found
    assert [word for word in words if word not in found.text] == [], found.text


# ------------------------------------------------------------------------- order, as a user sees it under torchrun

# fault -> (exit status, the line: what it must say)
SEEN = {
    "left out": (
        7,
        r"first mismatch: rank 1 left out all_reduce \[100\] float32 over dp at planted\.py:\d+ in reduce_",
    ),
    "shape": (5, r"first mismatch: all_reduce #\d+ over dp \(ranks 1, 3\): rank 1 calls it with \[99\]"),
    "dtype": (5, r"first mismatch: all_reduce #\d+ over dp \(ranks 1, 3\): rank 1 calls it with \[100\] float64"),
    "SIGSTOP": (7, r"rank 1 did not come; rank 1 is at .*its last call"),
    "SIGKILL": (5, ""),
    "lines": (0, r"first mismatch: call #\d+ of .* come from two lines in another order"),
}


ABORTED = ("shape", "dtype")  # by gloo


@pytest.mark.parametrize("fault", [
    pytest.param(fault, marks=() if fault == "left out" else pytest.mark.thorough) for fault in SEEN
])  # fmt: skip
def test_the_first_mismatch_is_one_line_on_the_console_and_in_the_files(
    tmp_path: Path, fault: str, capsys: Any
) -> None:
    status, line = SEEN[fault]
    dumps, folder = tmp_path / "dumps", tmp_path / "run"
    env = {"TORCH_FR_DUMP_TEMP_FILE": f"{dumps}/_dump_"}
    run = launch(PLANTED, 4, folder, timeout=60, args=[fault], env=env)
    assert run.returncode == status, run.explain() + "".join(run.stderr)
    said = re.findall(r"^first mismatch: .*$", "".join(run.stderr), re.MULTILINE)
    late = (
        fault in ABORTED and not said
    )  # a launcher ends the others at once: on a busy machine before they have spoken
    assert late or (len(said) == bool(line) and re.search(line, "".join(said))), run.stderr
    if fault == "SIGKILL":
        assert "rank 1 was killed by SIGKILL" in run.explain()
    if fault in ("left out", "SIGSTOP", "lines"):
        assert command.main([str(dumps)]) == 1
        assert said[0] in capsys.readouterr().out.splitlines(), "the command says it again"
        assert (dumps / "_dump_0").exists() and (dumps / "rank3.json").exists()


# ------------------------------------------------------------------------------------------------------------- time


def train(folder: Path, fault: str, more: str, status: int = 0, timeout: float = 120) -> Any:
    args = ["train", fault, *f"{TINY} {more}".split()]
    run = launch(PLANTED, 2, folder, timeout=timeout, args=args)
    assert run.returncode == status, run.explain() + "".join(run.stderr)
    return run


@pytest.mark.thorough
def test_slow_ranks_are_named_with_the_section_and_how_often(tmp_path: Path) -> None:
    """Four faults in one run: forward of rank 1 always, reading of rank 0 at times, then its optimizer, and a save."""
    faults = "forward:1:01234567,data:0:46,optimizer:0:57,save:1:01234567"
    log = tmp_path / "log.jsonl"
    more = f"--train-iters 8 --log-interval 4 --log-straggler --log-file {log} --save {tmp_path / 'ckpt'}"
    train(tmp_path / "run", faults, more)
    first, second, last = [
        record for record in map(json.loads, log.read_text().splitlines()) if record["event"] == "stragglers"
    ]
    assert [(one["rank"], one["section"], one["when"]) for one in first["slow"]] == [(1, "forward", "always")]
    named = {(one["rank"], one["section"]): one for one in second["slow"]}
    assert named.keys() == {(1, "forward"), (0, "data"), (0, "optimizer")}
    assert named[0, "data"]["when"] == named[0, "optimizer"]["when"] == "at times"
    assert [(one["rank"], one["section"]) for one in last["slow"]] == [(1, "save")]


@pytest.mark.thorough
def test_a_loader_that_is_stuck_is_named_with_its_line(tmp_path: Path) -> None:
    run = train(tmp_path, f"data:1:{planted.STUCK}", "--train-iters 8 --distributed-timeout-seconds 3", 7)
    text = "".join(run.stderr)
    said = re.findall(r"^first mismatch: .*$", text, re.MULTILINE)
    assert len(said) == 1 and "rank 1 did not come; rank 1 is at planted.py" in said[0], text
    assert "in happen: threading.Event().wait(600)" in said[0]
