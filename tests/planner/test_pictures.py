"""The numbers of the pictures are those of the plan; the folder and what cannot be drawn in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from minimegatron import cli
from minimegatron.errors import ConfigError
from minimegatron.planner.cluster import CLUSTERS
from minimegatron.planner.layouts import Layout
from minimegatron.planner.pictures import draw, losses
from minimegatron.planner.planning import Plan, plan
from minimegatron.training.arguments import parse_args

SMALL = "--preset laptop-10m --bf16 --seq-length 1024 --global-batch-size 16 --micro-batch-size 2 --num-layers 4"
PP = f"{SMALL} --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"


def planned(flags: str, world: int) -> Plan:
    return plan(parse_args(flags.split(), world, reads=False), world, CLUSTERS["h100"])


def test_the_waterfall_goes_from_the_models_flops_to_the_step() -> None:
    time = planned(PP, 8).time
    assert time is not None
    parts = losses(time)
    assert sum(seconds for seconds, _ in parts.values()) == pytest.approx(time.seconds, rel=1e-9)
    assert parts["model FLOPs at the peak"][0] / time.seconds == pytest.approx(time.mfu, rel=1e-9)
    assert parts["bubble"][1] == "wait" and parts["tp, not hidden"][1] == "comm"
    assert parts["memory-bound work"][1] == parts["optimizer"][1] == "memory"


def test_the_pictures_say_what_the_plan_says() -> None:
    told = planned(PP, 8)
    figures = draw(told)
    assert set(figures) == {"memory", "memory_over_step", "waterfall", "communication", "roofline", "timeline"}
    bars = [sum(bar.get_width() for bar in row) for row in zip(*figures["memory"].axes[0].containers, strict=True)]
    assert [bar * 2**20 for bar in bars] == pytest.approx([one.total for one in told.memory.values()])
    rows = [label.get_text() for label in figures["communication"].axes[0].get_yticklabels()]
    assert "tp (2 ranks): reduce_scatter" in rows and "pp (2 ranks): send" in rows and rows == sorted(rows)
    assert not any("recv" in row for row in rows)
    assert figures["timeline"].get_suptitle() == "The pipeline with 4 of 4 microbatches"


def test_both_products_of_experts_are_on_the_roofline() -> None:
    axes = draw(planned("--preset qwen1.5-moe-a2.7b --bf16 --num-layers 2 --seq-length 1024", 1))["roofline"].axes[0]
    assert {"mlp.experts, 2048 to 2816", "mlp.experts, 1408 to 2048"} <= {line.get_label() for line in axes.lines}


def test_one_rank_sends_nothing_and_has_no_pipeline() -> None:
    assert set(draw(planned(SMALL, 1))) == {"memory", "memory_over_step", "waterfall", "roofline"}


def test_without_a_time_there_is_memory_alone() -> None:
    assert set(draw(planned("--preset laptop-10m --freeze *linear_fc*", 1))) == {"memory"}


def test_the_fastest_layout_has_a_name() -> None:
    layout = Layout(tp=8, cp=1, pp=4, ep=1, etp=8, v=2, schedule="interleaved", micro_batch=1, recompute="full", zero=1)
    assert layout.words() == "tp 8, pp 4, v 2, interleaved, micro-batch 1, recompute full, ZeRO-1"


def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "pictures"
    words = f"--search --world-size 4 --top 2 --pictures {folder} {SMALL} --recompute-granularity full"
    assert cli.main(["plan", *words.split()]) == 0
    written = {file.name for file in folder.iterdir()}
    assert {"memory.png", "waterfall.png", "roofline.png", "search.png"} <= written
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in folder.iterdir())


def test_a_folder_that_cannot_be_is_refused_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("minimegatron.planner.planning.plan", lambda *_: pytest.fail("it was planned"))
    words = ["plan", "--world-size", "1", *SMALL.split(), "--pictures"]
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert cli.main([*words, str(path)]) == ConfigError.exit_code
        assert "name a folder that can be written" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*words, str(tmp_path / "folder")]) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert "matplotlib" in error and "pip install 'minimegatron[lab]'" in error
