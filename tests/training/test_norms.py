"""Norms by layer, those of one process in every layout and of what really moved; and the timeline of a step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.layers.param import logical_parameters
from minimegatron.trace import Event
from minimegatron.training.arguments import parse_args
from minimegatron.training.observers.norms import Norms, in_order, layer_of
from minimegatron.training.observers.timeline import Timeline, sections
from minimegatron.watch.log import RunLog
from tests.mock_data import small_trainer
from tests.thorough import mostly_thorough
from tests.training.test_experts import scalars
from tests.training.test_trainer import TINY, trainer_of

TP2, PP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
ZERO = "--data-parallel-sharding-strategy"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none --disable-bias-linear"
# SGD, because its update is linear: AdamW's first step makes of a rounding, where the gradient is 0, a whole update.
LINE = "--num-layers 2 --global-batch-size 4 --train-iters 2 --log-norms-interval 1 --optimizer sgd --clip-grad 0.05"
LINE += " --hidden-dropout 0 --attention-dropout 0"
Found = list[dict[str, Any]]


def norms_of(line: str, world: int = 1) -> tuple[Found, list[float | None]]:
    """(What the observer tells of each step, the norm of each step in the log)."""
    trainer = trainer_of(f"{LINE} {line}", world)
    found: Found = []
    observer = next(o for o in trainer.observers if isinstance(o, Norms))
    observer.tell = found.append
    trainer.train()
    return found, [report.grad_norm for report in trainer.history]


def on_rank(rank: int, world: int, line: str) -> tuple[Found, list[float | None]]:
    return norms_of(line, world)


def timeline_on_rank(rank: int, world: int) -> list[dict[str, Any]]:
    trainer = trainer_of(f"{LINE} {PP2} --log-timeline-interval 2", world)
    told: list[dict[str, Any]] = []
    observer = next(o for o in trainer.observers if isinstance(o, Timeline))
    observer.add = observer.write = told.append
    trainer.train()
    return told


def test_a_timeline_has_every_rank(ranks: Any) -> None:
    for line, drawn in ranks(2).run(timeline_on_rank):
        assert drawn["iteration"] == 2 and len(drawn["ranks"]) == 2
        for events in drawn["ranks"]:
            names = [name for name, kind, *_ in events if kind == "compute"]
            assert names.count("F") == names.count("B") == 4, "four microbatches"
            assert all(0 <= start <= 60 and seconds >= 0 for _, _, start, seconds, _ in events)
            assert {kind for _, kind, *_, axis in events if axis == "pp"} == {"comm", "wait"}
        assert line["sections"].keys() >= {"F", "B", "optimizer_step", "other"} and line["sections"]["waiting"][0] > 0
        assert all(least <= most for least, most in line["sections"].values())


LAYOUTS = [
    (4, TP2, ""),
    (2, PP2, ""),
    (2, f"{ZERO} optim", ""),
    (2, f"{ZERO} optim_grads_params", ""),
    (4, "--expert-model-parallel-size 2", EXPERTS),
    (2, f"{ZERO} optim_grads", ""),
    (2, "--use-torch-fsdp2", ""),
    (4, f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --num-layers 4", "--num-layers 4"),
    (2, "--context-parallel-size 2", ""),
    (4, f"{TP2} {ZERO} optim --bf16", "--bf16"),
]


@pytest.mark.parametrize("world, layout, model", mostly_thorough(LAYOUTS, range(5), quick=[0]))
def test_every_layout_has_the_norms_of_one_process(ranks: Any, world: int, layout: str, model: str) -> None:
    serial, global_norms = norms_of(model)
    for found, _ in ranks(world).run(on_rank, f"{model} {layout}"):
        for one, other in zip(serial, found, strict=True):
            assert list(one["norms"]) == list(other["norms"])
            for layer, wanted in one["norms"].items():
                assert other["norms"][layer] == pytest.approx(wanted, rel=2e-2 if "bf16" in model else 1e-4), layer
    for told, norm in zip(serial, global_norms, strict=True):
        together = math.hypot(*(grad for grad, _, _ in told["norms"].values()))
        assert norm is not None and together == pytest.approx(norm, rel=1e-6) and norm > 0.05, "clipped afterwards"


@pytest.mark.parametrize("more", ["--optimizer adam --lr 1e-3", "--fp16 --optimizer adam --initial-loss-scale 1024"])
def test_weights_and_updates_are_those_of_the_main_parameters(more: str) -> None:
    trainer = trainer_of(f"{LINE} --train-iters 1 {more}")
    found: Found = []
    next(o for o in trainer.observers if isinstance(o, Norms)).tell = found.append

    def mains() -> dict[str, torch.Tensor]:
        state = trainer.optimizer.state_dict()["state"]
        weights = {n: p.detach() for n, p in logical_parameters(trainer.model)}
        return {name: state[name].get("fp32_param", weights[name]).double().clone() for name in state}

    before = mains()
    trainer.train()
    after, (told,) = mains(), found
    for layer, (_, weights, ratio) in told["norms"].items():
        names = [name for name in before if layer_of(name) == layer]
        size = math.hypot(*(before[n].norm().item() for n in names))
        moved = math.hypot(*((after[n] - before[n]).norm().item() for n in names))
        assert weights == pytest.approx(size, rel=1e-6) and ratio == pytest.approx(moved / size, rel=1e-5) and ratio > 0
    together = math.hypot(*(grad for grad, _, _ in told["norms"].values()))
    assert together == pytest.approx(trainer.history[0].grad_norm, rel=1e-5), "without the loss scale"
    assert told["params_norm"] == pytest.approx(math.hypot(*(w.norm().item() for w in before.values())), rel=1e-6)


def test_every_log_gets_the_steps_that_were_asked_for(tmp_path: Path, capsys: Any) -> None:
    log, board = tmp_path / "run.jsonl", tmp_path / "board"
    line = f"{TINY} --mock-data {LINE} --train-iters 3 --log-norms-interval 2 --log-params-norm --log-file {log}"
    trainer = small_trainer(parse_args(f"{line} --tensorboard-dir {board} --log-timeline-interval 3".split()))
    trainer.train()
    trainer.close()
    records = [json.loads(text) for text in log.read_text().splitlines()]
    config, *steps = [r for r in records if r["event"] in ("config", "train")]
    machine = config["machine"]
    assert (machine["world_size"], machine["device"], machine["train_iters"]) == (1, "cpu", 3)
    assert ["norms" in step for step in steps] == [False, True, False]
    printed = [text for text in capsys.readouterr().out.splitlines() if text.startswith(" iteration")]
    for step, text in zip(steps, printed, strict=True):
        assert f"| params norm: {step['params_norm']:.3f} |" in text
        assert list(step["epochs"].values()) == [trainer.train_set.read_epochs(step["consumed_samples"])["mock data"]]
        assert step["memory_by_owner"]["gradients"] == step["memory_by_owner"]["parameters"] > 0
        assert 0 < step["memory_bytes"] <= 1.5 * step["peak_memory_bytes"] and step["samples_per_second"] > 0
    values = scalars(board)
    norms = steps[1]["norms"]["decoder.layers.1"]
    tags = [f"{kind}/decoder.layers.1" for kind in ("grad-norm", "params-norm", "update-ratio")]
    assert [values[tag] for tag in tags] == pytest.approx(norms)
    assert values["epoch"] == pytest.approx(*steps[-1]["epochs"].values()) and values["params-norm"] > 0
    (timeline,) = [r for r in records if r["event"] == "timeline"]
    (events,) = timeline["ranks"]
    names = [name for name, *_ in events]
    assert timeline["iteration"] == 3 and names.count("forward") == names.count("backward") == 4
    assert min(start for _, _, start, *_ in events) == 0 and names[-1] == "optimizer_step"
    spent = steps[-1]["sections"]
    assert list(spent) == ["forward", "backward", "optimizer_step", "other", "waiting"] and "sections" not in steps[0]
    assert sum(most for _, most in spent.values()) - spent["waiting"][1] == pytest.approx(timeline["seconds"])
    assert records[-1]["event"] == "end" and any("grad norm, below" in r.get("text", "") for r in records)
    assert values["time/forward max"] == pytest.approx(spent["forward"][1])
    watched = RunLog(log)
    watched.read()
    curves = watched.curves()["curves"]
    assert curves["lm loss"]["at"] == [1, 2, 3] and curves["params_norm"]["mean"][-1] > 0 and watched.ended
    assert list(watched.layers("gradient")) == list(steps[1]["norms"]) and watched.broken == watched.not_finite == 0


def test_a_span_inside_another_is_counted_once_and_waiting_beside_it():
    def event(name: str, kind: str, start: float, end: float) -> Event:
        return Event(name, kind, 0, start, end)

    events = [event("ring step", "compute", 1.0, 2.0), event("forward", "compute", 0.0, 4.0)]
    events += [
        event("wait", "wait", 1.5, 2.0),
        event("wait", "wait", 1.6, 1.8),
        event("forward", "compute", 5.0, 6.0),
        event("mark", "mark", 0.0, 9.0),
    ]
    assert sections(events, 8.0) == {"forward": 5.0, "other": 3.0, "waiting": 0.5}


def test_layers_come_in_the_order_of_the_model() -> None:
    names = {"decoder.layers.10", "decoder.final_layernorm", "decoder.layers.2", "embedding.word_embeddings"}
    assert in_order(names) == [
        "embedding.word_embeddings", "decoder.layers.2", "decoder.layers.10", "decoder.final_layernorm",
    ]  # fmt: skip
    assert layer_of("decoder.layers.3.mlp.experts.0.weight") == "decoder.layers.3"
    assert layer_of("output_layer.weight") == "output_layer"
