"""Families from outside of the package (`families.py`) are trained, planned, saved, resharded, loaded and published."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.checkpoint.conversion import open_model
from minimegatron.comm.mesh import Mesh
from minimegatron.commands.convert import main as convert
from minimegatron.commands.quantize import load_alone
from minimegatron.config.vision import Tower, register_tower
from minimegatron.data.tokenizer import NullTokenizer
from minimegatron.errors import ConfigError
from minimegatron.inference.engine import check_can_generate
from minimegatron.inference.generate import generate
from minimegatron.inference.loading import load
from minimegatron.models.chunks import count_parameters, stage_class
from minimegatron.models.families import FAMILIES, family_config, preset
from minimegatron.planner.cluster import CLUSTERS
from minimegatron.planner.planning import plan
from minimegatron.training.arguments import parse_args
from minimegatron.training.datasets import load_data, tokens_of
from tests.extension.families import ENCODER as ENCODERS
from tests.extension.families import Hidden, MeanColours, OneMatrix, TwoWay, registered
from tests.posttraining.test_tasks import near
from tests.posttraining.test_vlm import curve
from tests.training.test_trainer import TINY, history_on_rank, numbers

ENCODER = "--preset toy-encoder --num-layers 2 --num-attention-heads 4 --hidden-dropout 0 --micro-batch-size 1 "
ENCODER += "--global-batch-size 4 --lr-decay-iters 4 --train-iters 2"
SEES = "--preset toy-vlm --seq-length 64 --global-batch-size 4 --lr 3e-3 --lr-decay-style constant --train-iters 2"
TP2, PP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registered():
        yield


def trained(rank: int, world: int, line: str) -> list[Any]:
    with registered() if world > 1 else contextlib.nullcontext():
        return numbers(history_on_rank(rank, world, line))


def seen(rank: int, world: int, line: str) -> list[dict[str, float]]:
    with registered() if world > 1 else contextlib.nullcontext():
        return curve(rank, world, line, SEES)


def published_and_read_again(run: Path, folder: Path) -> None:
    convert(["--load", str(run), "--save", str(folder / "hf"), "--to", "hf"])
    convert(["--load", str(folder / "hf"), "--save", str(folder / "back"), "--to", "ours"])
    one, other = open_model(run), open_model(folder / "back")
    assert one.weights.tensors.keys() == other.weights.tensors.keys()
    assert all(torch.equal(one.weights.read(name), other.weights.read(name)) for name in one.weights.tensors)
    with pytest.raises(ConfigError, match="is not written for Megatron"):
        convert(["--load", str(folder / "hf"), "--save", str(folder / "megatron"), "--to", "torch_dist"])


def test_an_encoder_of_another_package(ranks, tmp_path):
    whole = trained(0, 1, f"{ENCODER} --save {tmp_path / 'run'} --save-interval 1")
    for line in (TP2, PP2):
        told = ranks(2).run(trained, f"{ENCODER} {line} --load {tmp_path / 'run'} --ckpt-step 1")[-1]
        for (loss, norm), (want, want_norm) in zip(told, whole[1:], strict=True):
            assert loss == pytest.approx(want, rel=1e-5) and norm == pytest.approx(want_norm, rel=1e-4)
    folder = open_model(tmp_path / "run")
    model, tokens = load(folder, Mesh.serial(), "fp32"), torch.arange(1, 9)[None]
    assert type(model) is TwoWay
    with torch.no_grad():
        one, other = model.full_logits(tokens), model.full_logits(tokens.where(tokens < 8, 40))
    assert (one[0, 0] - other[0, 0]).abs().max() > 1e-6, "its first token sees the last"
    with pytest.raises(ConfigError, match="generation by a TwoWay"):
        check_can_generate(model)
    with pytest.raises(ConfigError, match="a TwoWay predicts no next words"):
        load_alone(folder)
    published_and_read_again(tmp_path / "run", tmp_path)


def test_a_run_reads_samples_of_its_objective():
    run = parse_args(f"{TINY} --mock-data {ENCODER}".split(), 1)
    data = load_data(run, Mesh.serial(), (8, 0, 0))
    batch = data.train.batch(range(8))
    assert data.vocab_size == 64 and data.tokenizer.vocab_size == 63, "one id is left to the objective"
    assert ((batch["tokens"] == 63) == (batch["loss_mask"] > 0)).all() and batch["loss_mask"].any()
    assert tokens_of(data.train, 3) and tokens_of(data.train, 3) != tokens_of(data.train, 4), "a resumed run compares"


def test_its_samples_are_what_its_class_says():
    objective, texts = Hidden(NullTokenizer(63), 1), torch.arange(40).view(2, 20)

    class Texts:
        read_epochs = begun = None

        def batch(self, samples):
            return {"tokens": texts, "labels": texts + 1, "loss_mask": torch.ones(2, 20)}

    batch = objective.of_texts(Texts()).batch([3, 4])
    hidden = batch["loss_mask"] > 0
    assert 0 < hidden.sum() < 40 and (batch["tokens"][hidden] == 64).all()
    assert torch.equal(batch["tokens"][~hidden], texts[~hidden]) and torch.equal(batch["labels"], texts)


def test_what_its_class_refuses_is_refused_before_a_process_starts():
    with pytest.raises(ConfigError, match="minimegatron sft of a TwoWay"):
        parse_args([*ENCODER.split(), "--data-path", "lines.jsonl", "--seq-length", "16"], 1, task="sft")


def test_a_vision_encoder_of_another_package(ranks, tmp_path):
    line = f"--examples drawn --corpus-path {tmp_path} --micro-batch-size 2"
    whole = seen(0, 1, f"{line} --save {tmp_path / 'run'} --save-interval 1")
    for layout in (TP2, PP2):
        near(ranks(2).run(seen, f"{line} {layout} --load {tmp_path / 'run'} --ckpt-step 1")[-1], whole[1:])
    model = load(open_model(tmp_path / "run"), Mesh.serial(), "fp32")
    assert isinstance(model.vision_model.conv1, MeanColours) and isinstance(model.vision_projection, OneMatrix)
    assert len(generate(model, [[5, 6, 7]], 4)[0].tokens) == 4
    published_and_read_again(tmp_path / "run", tmp_path)


def test_both_are_planned():
    for line, more in ((f"{TINY} --mock-data {ENCODER}", {}), (f"{SEES} --examples drawn", {"task": "vlm"})):
        told = plan(parse_args(f"{line} {PP2}".split(), 2, **more), 2, CLUSTERS["h100"])
        assert not any(memory.unknown for memory in told.memory.values()) and told.bytes > 0
    assert count_parameters(family_config("toy_encoder", **preset("toy-encoder"))) > 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tests.extension.families:Nothing", "names no class"),
        ("tests.nowhere:TwoWay", "names no class"),
        ("TwoWay", "names no class"),
        ("tests.extension.families:MeanColours", "MeanColours is no class of stages"),
    ],
)
def test_a_class_that_is_none_is_refused(monkeypatch, name, says):
    config = family_config("toy_encoder", **preset("toy-encoder"))
    assert stage_class(config) is TwoWay
    monkeypatch.setitem(FAMILIES, "toy_encoder", dataclasses.replace(ENCODERS, fields={"model_class": name}))
    with pytest.raises(ConfigError, match=says) as error:
        stage_class(config.replace(model_class=name))
    assert error.value.fix


def test_what_a_file_names_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "named_by_a_file.py").write_text("raise SystemExit('it is executed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = family_config("toy_encoder", **preset("toy-encoder")).replace(model_class="named_by_a_file:Model")
    with pytest.raises(ConfigError, match="named by no family"):
        stage_class(config)


def test_a_package_that_is_installed_brings_its_family(tmp_path):
    (tmp_path / "brought.py").write_text(
        "from tests.extension.families import registered\nkept = registered()\nkept.__enter__()\n"
    )
    info = tmp_path / "brought-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[minimegatron.families]\nmine = brought\n")
    script = "from minimegatron.models.families import preset; print(preset('toy-encoder')['model_class'])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "tests.extension.families:TwoWay\n", done.stderr


def test_a_vision_encoder_that_nobody_registered_or_that_is_taken_is_refused():
    with pytest.raises(ConfigError, match="vision_model_type is 'colors'") as error:
        family_config("toy_vlm", **(preset("toy-vlm") | {"vision_model_type": "colors"}))
    assert "colours" in error.value.fix
    with pytest.raises(ConfigError, match="there is a vision_model_type 'clip' already"):
        register_tower("clip", Tower(fields={}))
