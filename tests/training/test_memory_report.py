"""Tables of memory: what they say, when, and that a step which is not watched is left alone."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch

from minimegatron.comm import shared_memory
from minimegatron.commands import memory
from minimegatron.errors import ConfigError
from minimegatron.memory import Tracker
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from minimegatron.training.memory_report import MemoryReport, table
from minimegatron.training.trainer import Trainer

SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data --lr 0.01 --kernels torch"
SMALL += " --hidden-dropout 0.1 --attention-dropout 0"


def trainer(words: str) -> Trainer:
    return build_trainer(parse_args(f"{SMALL} {words}".split()), quiet=True)


def numbers(line: str) -> list[float]:
    """Those of a row, a dash being nothing."""
    cells = re.split(r"\s{2,}", line.strip())[1:]
    return [0.0 if c == "-" else float(c.replace(",", "")) for c in cells if re.fullmatch(r"-|[\d.,e-]+", c)]


def test_a_row_ends_with_what_lasts_and_the_sum() -> None:
    mib = 2**20
    rows = [
        ("rank 0", {"parameters": 3 * mib, "moments": 6 * mib}, 9 * mib, "backward fc1"),
        ("rank 1", {"parameters": 3 * mib, "activations": 2000 * mib}, 3 * mib, ""),
    ]
    head, first, second = table(rows).splitlines()
    assert head.startswith("memory in MiB") and head.index("parameters") < head.index("moments")
    assert numbers(first) == [3, 6, 0, 9, 9] and first.endswith("  backward fc1")
    assert numbers(second) == [3, 0, 2000, 3, 2003]


@pytest.mark.slow
def test_every_nth_step_has_a_table_whose_rows_agree() -> None:
    run, said = trainer("--train-iters 4 --micro-batch-size 2 --log-memory-interval 2"), list[str]()
    run.metrics.say = said.append  # type: ignore[method-assign]
    run.train()
    tables = [text for text in said if text.startswith("memory of step")]
    assert [text.splitlines()[0] for text in tables] == ["memory of step 2", "memory of step 4"]
    for text in tables:
        _, head, predicted, counted = text.splitlines()
        assert "parameters" in head and "rank 0 predicted" in predicted and "counted" in counted
        told, found = numbers(predicted), numbers(counted)
        assert told[:3] == found[:3], "parameters, gradients and moments, exactly"
        assert told[-2] == found[-2] and found[-1] == pytest.approx(told[-1], rel=0.03)
        assert re.search(r"(forward|backward).*: aten\.", counted), "the moment has a name"


@pytest.mark.slow
def test_shared_memory_of_messages_has_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "nbytes", lambda: 3 * 2**20)
    run, said = trainer("--train-iters 1 --micro-batch-size 2 --log-memory-interval 1"), list[str]()
    run.metrics.say = said.append  # type: ignore[method-assign]
    run.train()
    rows = next(text for text in said if text.startswith("memory of step")).splitlines()
    assert rows[-1].startswith("messages") and rows[-1].endswith("shared memory, in no tensor")
    assert numbers(rows[-1])[-2] == 3.0, "between steps"


def memory_of(run: Trainer) -> MemoryReport:
    return next(observer for observer in run.observers if isinstance(observer, MemoryReport))


def test_a_step_that_is_not_watched_is_left_alone() -> None:
    off = trainer("--train-iters 2")
    assert isinstance(memory_of(off).during_step(0), contextlib.nullcontext)
    some = trainer("--train-iters 2 --log-memory-interval 3")
    assert isinstance(memory_of(some).during_step(1), contextlib.nullcontext)
    before = [len(m._forward_hooks) for m in some.model.modules()]
    with memory_of(some).during_step(2):
        assert [len(m._forward_hooks) for m in some.model.modules()] != before
    assert [len(m._forward_hooks) for m in some.model.modules()] == before


def test_watching_changes_no_number() -> None:
    plain = trainer("--train-iters 3")
    plain.train()
    watched = trainer("--train-iters 3 --log-memory-interval 1")  # which starts the random streams anew
    watched.train()
    assert [r.losses for r in plain.history] == [r.losses for r in watched.history]
    weights = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)


def test_a_tracker_has_no_samples_of_what_ends_after_its_block() -> None:
    kept = torch.zeros(100)
    with Tracker({"parameters": [kept]}) as tracker:
        more = kept + 1
    seen = len(tracker.samples)
    del kept, more
    assert len(tracker.samples) == seen and tracker.peak.owners == {"parameters": 400, "workspace": 400}
    assert tracker.peak.operation == "aten.add.Tensor"


@pytest.mark.slow
def test_tensorboard_gets_bytes_by_name(tmp_path: Any) -> None:
    run = trainer(f"--train-iters 1 --log-memory-to-tensorboard --tensorboard-dir {tmp_path}")
    run.train()
    weights = sum(p.numel() * p.element_size() for p in run.model.parameters())
    want = {"memory/parameters": weights, "memory/gradients": weights, "memory/moments": 2 * weights}
    assert run.metrics.more_tags() == want
    assert trainer("--train-iters 1").metrics.more_tags() == {}


def test_a_cpu_has_no_history_of_its_allocator() -> None:
    with pytest.raises(ConfigError, match="record_memory_history on a CPU"):
        trainer("--train-iters 1 --record-memory-history")


def test_the_command_says_what_each_stage_of_a_layout_holds(capsys: Any) -> None:
    flags = f"{SMALL} --num-layers 4 --global-batch-size 64 --use-distributed-optimizer --bf16 --kernels torch".split()
    assert memory.main([*flags, "--world-size", "16", "--pipeline-model-parallel-size", "2"]) == 0
    _, first, last, _, most, kept = capsys.readouterr().out.splitlines()
    assert first.startswith("rank 0, layers 0-1 ") and last.startswith("rank 8, layers 2-3 ")
    assert most.startswith("rank 0 is fullest, ") and "gradients 40%" in most and "under way: " in kept
    assert memory.main([*flags, "--world-size", "1"]) == 0
    _, alone, *_ = capsys.readouterr().out.splitlines()
    assert numbers(alone)[-2] > numbers(first)[-2], "a stage of two, and an eighth of its states"


def test_the_command_says_what_it_does_not_predict(capsys: Any) -> None:
    asking = "--spec tests.extension.retention asking --device cpu"
    assert memory.main([*SMALL.split(), *asking.split()]) == 0
    said = capsys.readouterr().out
    assert "not predicted, and not in the peak: a layer that asks for numbers" in said and "is fullest" not in said
    with pytest.raises(ConfigError, match="--world-size 0"):
        memory.main(["--world-size", "0"])


def test_the_example_of_the_help_runs(capsys: Any) -> None:
    assert memory.main(["--help"]) == 0
    example = capsys.readouterr().out.split("minimegatron memory ")[1].splitlines()[0]
    assert memory.main(example.split()) == 0
    assert "rank 0 is fullest" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_says_what_loads_of_experts_are_assumed(capsys: Any) -> None:
    experts = "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --micro-batch-size 8"
    layout = "--expert-model-parallel-size 2 --world-size 2"
    assert memory.main([*SMALL.split(), *experts.split(), *layout.split()]) == 0
    assert "experts are taken to get equal loads" in capsys.readouterr().out
