"""Experts in the training loop: one curve in every layout, loads in every log, flags as in Megatron."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.training.arguments import parse_args
from minimegatron.training.reports import StepReport
from tests.mock_data import small_trainer
from tests.thorough import SLOW, mostly_thorough

LINE = (
    "--mock-data --seq-length 16 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 64 "
    "--train-iters 2 --global-batch-size 8 --lr 3e-3 --lr-decay-style constant --eval-interval 1 --eval-iters 1 "
    "--log-interval 1 --hidden-dropout 0 --attention-dropout 0 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --check-replicas-interval 1 "
    "--num-experts 4 --moe-ffn-hidden-size 48 --moe-layer-freq ([0]*1+[1]*1) --moe-aux-loss-coeff 1e-2 "
    "--moe-z-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall"
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EP2 = "--expert-model-parallel-size 2"


def trained(rank: int, world: int, line: str) -> list[StepReport]:
    trainer = small_trainer(parse_args(line.split(), world), quiet=True)
    trainer.train()
    return trainer.history


@SLOW
@pytest.mark.parametrize("more", mostly_thorough(["", "--bf16", "--fp16 --initial-loss-scale 1024"], [0]))
def test_one_curve_in_every_layout(ranks, more):
    """The microbatch of each step is the same sample, whoever has it: the balancing loss is one of a microbatch."""
    line = f"{LINE} --micro-batch-size 1 {more}"
    want = ranks(1).run(trained, line)[0]
    layouts = {2: f"{TP2} {EP2} --expert-tensor-parallel-size 1"}
    if not more:
        layouts[4] = f"{EP2} --pipeline-model-parallel-size 2"
    for world, layout in layouts.items():
        found = ranks(world).run(trained, f"{line} {layout}", timeout=60)
        assert all(history == found[0] for history in found), "every rank reports the same"
        compare(found[0], want, 2e-2 if more else 1e-4)


def compare(found: list[StepReport], want: list[StepReport], rel: float) -> None:
    assert len(found) == len(want) == 2
    for got, expected in zip(found, want, strict=True):
        assert got.losses["lm loss"] == pytest.approx(expected.losses["lm loss"], rel=rel)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=5 * rel)
        (load,), (one) = got.experts, expected.experts[0]
        assert load.layer == 1 and sum(load.tokens) == sum(one.tokens) == 2 * 8 * 16 and load.dropped == 0
        assert load.balancing_loss == pytest.approx(one.balancing_loss, rel=10 * rel)
        assert load.z_loss == pytest.approx(one.z_loss, rel=10 * rel)


@pytest.mark.slow
def test_loads_are_in_every_log(tmp_path, capsys):
    line = f"{LINE} --micro-batch-size 2 --moe-expert-capacity-factor 0.5 --log-file {tmp_path}/log.jsonl"
    with trace.record() as log:
        trainer = small_trainer(parse_args(f"{line} --tensorboard-dir {tmp_path}/tb".split()), Mesh.serial())
        trainer.train()
        trainer.close()
    said = [row for row in capsys.readouterr().out.splitlines() if row.startswith(" iteration")]
    assert all("load_balancing_loss: " in row and "z_loss: " in row and "busiest expert: " in row for row in said)
    last = trainer.history[-1].experts[0]
    assert last.dropped > 0
    records = [json.loads(row) for row in (tmp_path / "log.jsonl").read_text().splitlines()]
    (written,) = [r for r in records if r["event"] == "train"][-1]["experts"]
    assert written["tokens"] == last.tokens and written["dropped"] == last.dropped
    marks = log.select("expert_load", kind="mark")
    assert len(marks) == 2
    assert marks[-1].note == f"layer 1: {' '.join(map(str, last.tokens))}, {last.dropped} dropped"
    tags = scalars(tmp_path / "tb")
    assert last.penalties["load_balancing_loss"] == pytest.approx(last.balancing_loss / 1e-2, rel=1e-9)
    mean = sum(last.tokens) / 4
    assert [tags[f"experts/layer 1/load {e}"] for e in range(4)] == pytest.approx([n / mean for n in last.tokens])
    assert tags["load_balancing_loss"] == pytest.approx(last.penalties["load_balancing_loss"], rel=1e-6)
    assert 1.0 <= tags["load_balancing_loss"] < 1.2, "as in Megatron, without its coefficient: even is 1"
    assert tags["experts/layer 1/dropped"] == pytest.approx(last.dropped / sum(last.tokens), rel=1e-6)


def test_several_balancing_losses_have_megatrons_names(capsys):
    """Of one sequence a microbatch, two of the three are the same number."""
    kinds = "--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-3 1e-4"
    trainer = small_trainer(parse_args(f"{LINE} --micro-batch-size 1 --train-iters 1 {kinds}".split()), Mesh.serial())
    trainer.train()
    found = trainer.history[0].experts[0].penalties
    names = ["load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss"]
    assert list(found) == names and found[names[0]] == pytest.approx(found[names[1]], rel=1e-6) != found[names[2]]
    assert trainer.history[0].experts[0].balancing_loss == pytest.approx(
        1e-2 * found[names[0]] + 1e-3 * found[names[1]] + 1e-4 * found[names[2]], rel=1e-6
    )
    assert " | ".join(f"{name}: {found[name]:.6E}" for name in names) in capsys.readouterr().out


def scalars(folder: Any) -> dict[str, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
