"""The numbers of the pictures are those of the plan; the folder and what cannot be drawn in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from minimegatron import cli
from minimegatron.errors import ConfigError
from minimegatron.memory import Sample
from minimegatron.models.chunks import schedule_of
from minimegatron.parallel.pipeline.schedule_sim import peak_live
from minimegatron.planner.cluster import CLUSTERS
from minimegatron.planner.layouts import Layout
from minimegatron.planner.pictures import draw, losses, memory_over_step
from minimegatron.planner.planning import Plan, plan, without_host
from minimegatron.planner.timing import stages_of_run
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
    axes = draw(planned(f"{SMALL} --num-experts 4 --disable-bias-linear", 1))["roofline"].axes[0]
    assert {"mlp.experts", "mlp.experts 2"} <= {line.get_label() for line in axes.lines}


def test_one_rank_sends_nothing_and_has_no_pipeline() -> None:
    assert set(draw(planned(SMALL, 1))) == {"memory", "memory_over_step", "waterfall", "roofline"}


def test_without_a_time_there_is_memory_alone() -> None:
    assert set(draw(planned("--preset laptop-10m --freeze *linear_fc*", 1))) == {"memory"}


def test_the_fastest_layout_has_a_name() -> None:
    layout = Layout(tp=8, cp=1, pp=4, ep=1, etp=8, v=2, schedule="interleaved", micro_batch=1, recompute="full", zero=1)
    assert layout.words() == "tp 8, pp 4, v 2, interleaved, micro-batch 1, recompute full, ZeRO-1"


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


# -------------------------------------------------------------------------------------------------- memory over a step


TINY = "--preset laptop-10m --bf16 --seq-length 512 --micro-batch-size 1 --num-layers 8 --vocab-size 512"
PP4 = "--pipeline-model-parallel-size 4 --pipeline-schedule"
V2 = "--num-virtual-stages-per-pipeline-rank 2"


def step_of(flags: str, world: int, batch: int) -> Plan:
    words = f"{TINY} --global-batch-size {batch} {flags}".split()
    return plan(parse_args(words, world, reads=False), world, CLUSTERS["h100"])


def fullest(samples: list[Sample]) -> Sample:
    return max(samples, key=lambda sample: sample.total)


@pytest.mark.parametrize(
    "flags, world, batch, drawn",
    [
        ("", 1, 8, 4),
        ("--data-parallel-sharding-strategy optim_grads_params --optimizer-cpu-offload", 2, 4, 2),
        (f"{PP4} 1f1b", 4, 32, 16),
        (f"{PP4} 1f1b --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full", 8, 6, 6),
        (f"{PP4} gpipe", 4, 24, 24),
        (f"{PP4} interleaved {V2}", 4, 32, 16),
        (f"{PP4} zb_h1", 4, 32, 16),
        (f"{PP4} zb_v", 4, 32, 16),
    ],
)
def test_the_fullest_sample_is_the_planned_peak_owner_by_owner(flags: str, world: int, batch: int, drawn: int) -> None:
    told = step_of(flags, world, batch)
    passed = memory_over_step(told)
    assert (passed.microbatches, passed.total) == (drawn, batch // told.run.parallel.data_parallel_size(world))
    for rank, samples in passed.ranks.items():
        assert dict(fullest(samples).owners) == without_host(told.memory[rank].peak)
        seconds = [sample.seconds for sample in samples]
        assert seconds == sorted(seconds) and seconds[-1] == passed.ranks[0][-1].seconds
        for sample in samples[:1] + samples[-1:]:
            assert sample.total == sum(without_host(told.memory[rank].lasting).values()), "what comes goes again"
        for owner, n in without_host(told.memory[rank].lasting).items():
            assert {sample.owners[owner] for sample in samples} == {n}


@pytest.mark.parametrize("name", ["1f1b", "gpipe", f"interleaved {V2}", "dualpipe_v"])
def test_between_its_actions_a_rank_keeps_what_the_schedule_says(name: str) -> None:
    """Rank 1 has neither end of the model, so all its chunks keep as much."""
    told = step_of(f"{PP4} {name}", 4, 12)
    cut, z, _ = stages_of_run(told.run, 4, CLUSTERS["h100"])
    samples = memory_over_step(told).ranks[1]
    kept = sum(told.memory[1].kept.values()) // cut.chunks
    still = [sample.owners.get("activations", 0) for sample in samples[1:] if not sample.where]
    assert max(still) == peak_live(schedule_of(cut, z.mesh.parallel, 12))[1] * kept


def test_activations_pile_up_forward_and_go_backward() -> None:
    samples = memory_over_step(step_of("", 1, 1)).ranks[0]
    kept = [sample.owners.get("activations", 0) for sample in samples]
    top = kept.index(max(kept))
    assert kept[:top] == sorted(kept[:top]) and len(set(kept[:top])) > 8, "layer by layer"
    assert kept[top:] == sorted(kept[top:], reverse=True)


def test_the_optimizer_takes_its_time_behind_the_passes() -> None:
    told = step_of("", 1, 2)
    *_, behind, end = memory_over_step(told).ranks[0]
    assert told.time is not None
    assert end.seconds - behind.seconds == pytest.approx(told.time.parts["optimizer"])
    assert end.seconds == pytest.approx(told.time.seconds)
