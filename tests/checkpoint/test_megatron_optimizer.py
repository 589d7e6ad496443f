"""A training of Megatron's goes on here: every moment to the bit, and the next steps are the ones Megatron takes."""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.checkpoint.commit import read_manifest
from minimegatron.checkpoint.load import read_tensors
from minimegatron.checkpoint.regions import Logical, Region
from minimegatron.checkpoint.shard_file import DTYPES
from minimegatron.checkpoint.sources import InMemory, whole
from minimegatron.checkpoint.torch_dist import TorchDist, read_common, read_number, write_torch_dist
from minimegatron.comm.axis import ALONE
from minimegatron.commands.convert import main
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.layers.param import logical_parameters
from minimegatron.training.arguments import parse_args
from tests.golden import HERE
from tests.mock_data import small_trainer
from tests.oracle import torch_dist, trained, zero
from tests.thorough import THOROUGH, mostly_thorough

# `python -m tests.oracle.trained FOLDER llama 2 1 2 fully_reshardable`: tp 2, dp 2, the distributed optimizer
FROZEN = HERE / "torch_dist_trained"
EXPERTS_AND_REST = ("embedding", "output_layer")  # in a chain of two optimizers: the second one's, here


def convert(theirs: Path, ours: Path, *words: str) -> Path:
    assert main(["--load", str(theirs), "--to", "ours", "--save", str(ours), *words]) == 0
    return ours


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    """The frozen checkpoint, as one of ours."""
    return convert(FROZEN, tmp_path_factory.mktemp("trained") / "ours")


def stored(root: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint of ours, whole."""
    manifest = read_manifest(root, step)
    table = {}
    for name, tensor in manifest.tensors.items():
        made = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
        table[name] = Logical(tensor.shape, [Region(whole(tensor.shape), made)], made.dtype)
    read_tensors(table, root / f"iter_{step:07d}", manifest, ALONE)
    return {name: tensor.parts[0].data for name, tensor in table.items()}


def check_bits(root: Path, said: dict[str, Any], half: bool) -> None:
    """What a checkpoint of ours holds is what Megatron's ranks held, by its hashes."""
    found = stored(root, trained.BEFORE)
    wanted = {f"optimizer.{key.replace(' ', '.')}": digest for key, digest in said["state"].items()}
    names = {key.split()[1] for key in said["state"]}
    for name in names:
        main, weight = wanted[f"optimizer.fp32_param.{name}"], found[f"model.{name}"]
        if half:
            assert torch.equal(found[f"optimizer.fp32_param.{name}"].to(torch.bfloat16), weight), name
        else:  # the weight is the main parameter
            assert trained.sha256(weight) == wanted.pop(f"optimizer.fp32_param.{name}") == main
        assert found[f"optimizer.step.{name}"] == trained.BEFORE
    moments = {key: value for key, value in found.items() if not key.startswith(("model.", "optimizer.step."))}
    assert {key: trained.sha256(value) for key, value in moments.items()} == wanted
    assert all(moments[key].abs().max() > 0 for key in moments), "a moment of zeros would prove nothing"


def test_every_moment_is_megatrons_to_the_bit(ours):
    check_bits(ours, json.loads((FROZEN / "trained.json").read_text()), half=False)


# ------------------------------------------------------------------------------------------------ going on


class Samples:
    """The oracle's tokens, sample after sample."""

    def __len__(self) -> int:
        return trained.SAMPLES

    def batch(self, samples: Sequence[int]) -> dict[str, torch.Tensor]:
        tokens = torch.stack([torch.as_tensor(trained.samples()[k]) for k in samples])
        positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
        labels = tokens[:, 1:].contiguous()
        return {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": labels,
            "loss_mask": torch.ones(labels.shape),
            "position_ids": positions,
        }


def go_on(rank: int, world: int, root: str, words: str) -> dict[str, Any]:
    """The steps after the checkpoint: trace, learning rates, and norm and probe of every weight."""
    line = f"--mock-data --load {root} --use-checkpoint-args {json.loads(words)}"
    trainer = small_trainer(parse_args(shlex.split(line), world), quiet=True)
    trainer.train_set = Samples()  # type: ignore[assignment]
    try:
        trainer.train()
        with trainer.model.whole_weights():
            held = {name: param.detach().float() for name, param in logical_parameters(trainer.model)}
            last = {name: [value.double().norm().item(), zero.probe(name, value)] for name, value in held.items()}
    finally:
        trainer.close()
    trace = [[report.losses["lm loss"], report.grad_norm] for report in trainer.history]
    return {"trace": trace, "last": last, "iteration": trainer.state.iteration}


LAYOUTS = [
    (1, ""),
    (2, "--use-distributed-optimizer"),
    (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    (2, "--pipeline-model-parallel-size 2"),
    (4, "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"),
    (2, "--use-torch-fsdp2"),
]


@pytest.mark.parametrize(("world", "layout"), mostly_thorough(LAYOUTS, [1]))
def test_the_next_steps_are_megatrons_in_any_layout(ranks, ours, world, layout):
    said = json.loads((FROZEN / "trained.json").read_text())
    results = ranks(world).run(go_on, str(ours), json.dumps(f"{said['flags']} {layout}"), timeout=120)
    for got in results:
        assert got["iteration"] == trained.BEFORE + trained.AFTER
        torch.testing.assert_close(
            torch.tensor(got["trace"]), torch.tensor(said["trace"][trained.BEFORE :]), rtol=0, atol=1e-5
        )
    if "model-parallel" not in layout:  # each rank has every weight, whole
        for name, numbers in said["last"].items():
            assert got["last"][name] == pytest.approx(numbers, rel=1e-5, abs=1e-5), name


def test_without_the_optimizer_the_next_steps_are_others(tmp_path):
    """So what the test above compares depends on the moments."""
    said = json.loads((FROZEN / "trained.json").read_text())
    weights = convert(FROZEN, tmp_path / "weights", "--no-load-optim")
    flags = said["flags"].replace(f"--train-iters {trained.BEFORE + trained.AFTER}", "--train-iters 2")
    got = go_on(0, 1, str(weights), json.dumps(flags))
    assert got["iteration"] == 2
    apart = [abs(got["last"][name][0] - norm) for name, (norm, _) in said["last"].items()]
    assert max(apart) > 1e-3, apart


def test_a_schedule_that_is_another_one_is_refused(ours):
    said = json.loads((FROZEN / "trained.json").read_text())
    with pytest.raises(
        CheckpointError, match="the schedule is not the checkpoint's; --lr: 0.1 now, 0.003 in the checkpoint"
    ):
        go_on(0, 1, str(ours), json.dumps(said["flags"].replace("--lr 3e-3", "--lr 0.1")))


def test_every_tensor_is_explained_and_a_dtype_cannot_change(tmp_path, capsys):
    assert main(["--load", str(FROZEN), "--to", "ours", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "): goes on at iteration 3" in said
    assert (
        "optimizer.exp_avg.decoder.layers.1.mlp.linear_fc2.weight  float32 [16, 24]  "
        "<-  optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight[1]" in said
    )
    with pytest.raises(CheckpointError, match="which a conversion to bf16 does not take over"):
        convert(FROZEN, tmp_path / "half", "--bf16")
    assert not (tmp_path / "half").exists()


# ------------------------------------------------------------------------------------------------ what is refused


def written(folder: Path, change: Any) -> Path:
    """The frozen checkpoint written again, its tensors and `common.pt` changed before."""
    theirs, common = TorchDist(FROZEN / "iter_0000003"), read_common(FROZEN / "iter_0000003")
    tensors = {name: theirs.read(name) for name in theirs.tensors}
    args = vars(torch_dist.arguments({**torch_dist.MODELS["llama"], "vocab_size": 64}))
    common["args"] = {**args, "consumed_train_samples": 24, "lr_warmup_init": 0.0}
    objects: list[str] = change(tensors, common) or []
    write_torch_dist(InMemory(tensors), args, objects, folder)
    torch.save({**common, "args": argparse.Namespace(**common["args"])}, folder / "common.pt")
    return folder


def chained(tensors: dict[str, torch.Tensor], common: dict[str, Any]) -> None:
    """Two optimizers, in Megatron's older names, whose step is a tensor; fp16's scaler."""
    for name in [name for name in tensors if name.startswith("optimizer.")]:
        tensors[f"chained_{int(name.rpartition('.')[0].endswith(EXPERTS_AND_REST))}.{name}"] = tensors.pop(name)
    scaler = {"scale": torch.tensor([1024.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    shared = {"state": {"common_step": torch.tensor(3.0)}, "param_groups": [{"lr": 1.0}]}
    common["optimizer"] = {i: {"optimizer": shared, "grad_scaler": scaler} for i in range(2)}


def test_a_chain_of_optimizers_is_one(ours, tmp_path):
    found = convert(written(tmp_path / "theirs", chained), tmp_path / "ours")
    same, got = stored(ours, 3), stored(found, 3)
    assert same.keys() == got.keys() and all(torch.equal(same[name], got[name]) for name in same)
    scaler = read_manifest(found, 3).state["grad_scaler"]
    assert scaler == {"scale": 1024.0, "growth_tracker": 3, "hysteresis_tracker": 2}
    counters = read_manifest(found, 3).state["counters"]
    assert (counters["iteration"], counters["consumed_train_samples"], counters["skipped_iterations"]) == (3, 24, 0)


NORM = "optimizer.state.{}.decoder.final_layernorm.weight"


def _sharding(name: str) -> Any:
    return lambda tensors, common: common["optimizer"].update(param_state_sharding_type=name)


def _object(tensors: dict[str, torch.Tensor], common: dict[str, Any]) -> list[str]:
    common.pop("optimizer")
    for name in [name for name in tensors if name.startswith("optimizer.")]:
        del tensors[name]
    return ["optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"]


def _other_steps(tensors: dict[str, torch.Tensor], common: dict[str, Any]) -> None:
    common["optimizer"]["optimizer"]["param_groups"][0]["step"] = 2.0


def _nested(tensors: dict[str, torch.Tensor], common: dict[str, Any]) -> None:
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        group["step"] = torch.ones(2)


REFUSED: dict[str, tuple[Any, str]] = {
    "buckets": (_sharding("dp_reshardable"), r"dp_reshardable.*is stored in a form that is not read"),
    "older buckets": (_sharding("fully_sharded_bucket_space"), r"fully_sharded_bucket_space.*not read"),
    "pieces": (_sharding("fully_sharded_model_space"), r"fully_sharded_model_space.*not read"),
    "an object": (_object, r"1 tensors and objects, of a distributed optimizer, the first is.*param_state"),
    "no second moment": (
        lambda t, _: t.pop(NORM.format("exp_avg_sq")),
        "exp_avg_sq of decoder.final_lay.* is not there",
    ),
    "a moment more": (
        lambda t, _: t.update({NORM.format("exp_avg").replace("final", "first"): torch.ones(16)}),
        "exp_avg of decoder.first_layernorm.weight is",
    ),
    "a moment twice": (
        lambda t, _: t.update({f"chained_1.{NORM.format('exp_avg')}": torch.ones(16)}),
        "exp_avg of decoder.final_layernorm.weight is there twice",
    ),
    "a moment in bf16": (
        lambda t, _: t.update({NORM.format("exp_avg"): t[NORM.format("exp_avg")].bfloat16()}),
        "exp_avg of decoder.final_layernorm.weight is bfloat16 of shape",
    ),
    "another optimizer": (
        lambda t, _: t.update({NORM.format("momentum_buffer"): torch.ones(16)}),
        "there is optimizer.state.momentum_buffer.decoder.final",
    ),
    "weights that are not the main parameters": (
        lambda t, _: t[NORM.format("param")].add_(1),
        "the main parameter of decoder.final_layernorm.weight is not its weight",
    ),
    "steps that differ": (_other_steps, r"its steps are \[2.0, 3.0\]"),
    "a step that is no number": (_nested, "a number of common.pt is .* it is no tensor of one element"),
    "no schedule": (lambda _, c: c.pop("opt_param_scheduler") and None, "opt_param_scheduler"),
    "no place in the data": (lambda _, c: c["args"].pop("consumed_train_samples") and None, "consumed_train_samples"),
    "a counter below 0": (lambda _, c: c.update(iteration=-1), "a counter is -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name_and_the_weights_are_still_there(case, tmp_path):
    def change(tensors: dict[str, torch.Tensor], common: dict[str, Any]) -> list[str]:
        found = REFUSED[case][0](tensors, common)
        return found if isinstance(found, list) else []

    theirs = written(tmp_path / "theirs", change)
    with pytest.raises(CheckpointError, match=REFUSED[case][1]) as said:
        convert(theirs, tmp_path / "ours")
    assert "--no-load-optim converts the weights alone" in str(said.value) and not (tmp_path / "ours").exists()
    convert(theirs, tmp_path / "weights", "--no-load-optim")
    assert not [name for name in stored(tmp_path / "weights", 0) if name.startswith("optimizer.")]


def test_a_number_beside_the_pickle_is_read_without_torch_load(tmp_path):
    torch.save({"scale": torch.tensor([0.0, 7.0])[1:]}, tmp_path / "common.pt")
    assert read_number(tmp_path, read_common(tmp_path)["scale"]) == 7.0
    for value in ("7", None, True, [7]):
        with pytest.raises(ValueError, match="a number of common.pt is"):
            read_number(tmp_path, value)


def test_bytes_of_common_that_changed_are_an_error_of_ours_or_change_numbers_only(tmp_path):
    """Whatever is flipped in its pickle, under a checksum that fits, nothing but an error of ours comes out."""
    copied = Path(shutil.copytree(FROZEN, tmp_path / "theirs"))
    path, draw, refused = copied / "iter_0000003" / "common.pt", random.Random(0), 0
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for _ in range(40):
        changed = bytearray(members["common/data.pkl"])
        for _ in range(draw.choice((1, 1, 4))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, bytes(changed) if name == "common/data.pkl" else content)
        try:
            main(["--load", str(copied), "--to", "ours", "--dry-run"])
        except (CheckpointError, ConfigError):
            refused += 1
    assert 15 < refused < 40


# ------------------------------------------------------------------------------------------------ Megatron itself

LIVE = [
    ("gpt", 1, 2, 1, "plain"),
    ("gpt2", 2, 1, 1, "plain"),
    ("qwen", 2, 1, 1, "plain bf16"),
    ("llama", 2, 1, 2, "fully_reshardable bf16"),
    ("qwen", 1, 2, 2, "fully_reshardable"),
]


def oracle(folder: Path, *words: Any) -> dict[str, Any]:
    """Megatron trains, saves, and goes on."""
    pytest.importorskip("megatron.core", reason="pip install --no-deps megatron-core==0.16.1")
    folder.mkdir()
    line = [sys.executable, "-m", "tests.oracle.trained", str(folder), *(str(w) for w in words)]
    subprocess.run(line, check=True, capture_output=True, text=True, timeout=300)
    return json.loads((folder / "trained.json").read_text())  # type: ignore[no-any-return]


@THOROUGH
@pytest.mark.parametrize(("name", "tp", "pp", "dp", "how"), LIVE)
def test_megatron_trains_and_we_go_on(ranks, name, tp, pp, dp, how, tmp_path):
    said = oracle(tmp_path / "theirs", name, tp, pp, dp, *how.split())
    half = how.endswith("bf16")
    root = convert(tmp_path / "theirs", tmp_path / "ours")
    check_bits(root, said, half)
    words = json.dumps(f"{said['flags']} --use-distributed-optimizer" + " --bf16" * half)
    for got in ranks(2).run(go_on, str(root), words, timeout=120):
        wanted = torch.tensor(said["trace"][trained.BEFORE :])
        torch.testing.assert_close(torch.tensor(got["trace"]), wanted, rtol=0, atol=1e-2 if half else 1e-5)


@THOROUGH
@pytest.mark.parametrize("how", ["dp_reshardable", "dp_zero_gather_scatter"])
def test_what_megatron_stores_otherwise_is_refused(how, tmp_path):
    oracle(tmp_path / "theirs", "llama", 2, 1, 1, how)
    with pytest.raises(CheckpointError, match=f"{how}.* is stored in a form that is not read"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    convert(tmp_path / "theirs", tmp_path / "ours", "--no-load-optim")
