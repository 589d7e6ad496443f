"""Adapters beside packed weights (QLoRA): gradients, layouts, memory and checkpoints are those beside whole ones."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.checkpoint.conversion import fill, open_model
from minimegatron.checkpoint.packed import fields_of_base, read_base
from minimegatron.cli import main
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import generate
from minimegatron.inference.loading import load
from minimegatron.inference.refit import weights_of
from minimegatron.layers.logical import draw, gather_logical
from minimegatron.layers.lora import merge, packed_of
from minimegatron.layers.param import Init, layout_of, logical_parameters
from minimegatron.models.chunks import build_stage
from minimegatron.optim.groups import train_added
from minimegatron.posttraining.tasks import TASKS
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from minimegatron.training.trainer import Trainer
from tests.inference.ranked import PROMPTS, ids
from tests.inference.test_packed import close, small
from tests.mock_data import small_trainer
from tests.thorough import mostly_thorough

RANK = {"lora_rank": 3, "lora_alpha": 6.0}
LINE = (
    "--load {0} --lora-rank 3 --lora-alpha 6 --mock-data --seq-length 16 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 3 --lr 1e-2 --lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size 98 "
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small("llama2", "int4", tmp_path_factory.mktemp("base"))


def trainer_of(line: str, world: int = 1, **options: Any) -> Trainer:
    return small_trainer(parse_args(shlex.split(line), world), **options)


def gradients(
    rank: int, world: int, folder: Path, packed: bool, dtype: torch.dtype, layout: dict[str, Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and the logical gradients of all adapters, whose B is not 0."""
    opened = open_model(folder)
    base = {"lora_base": str(folder), **fields_of_base(str(folder))} if packed else {}
    config, mesh = opened.config.replace(**RANK, **base), Mesh.build(ParallelConfig(**layout))
    model = build_stage(config, mesh)
    for param in model.parameters():
        param.detach().zero_()  # the folder has no rows for the vocabulary's padding
    wanted = {n: w for n, w in weights_of(model).items() if "lora" not in n}
    fill(wanted, opened, "fp32")
    read_base(model, config)
    model = model.to(dtype)
    for weight in packed_of(model):
        weight.dtype = dtype
    for name, param in logical_parameters(model):
        if (whole := layout_of(param)).added:
            start = draw(name, whole.__class__(whole.shape, init=Init(std=0.2)), 3)
            param.data.copy_(whole.take(start))
    train_added(model)
    tokens = ids(2, 13)
    loss = model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
    loss.backward()
    assert bool(packed_of(model)) == packed
    found = {}
    for name, param in logical_parameters(model):
        if param.requires_grad:
            assert param.grad is not None
            found[name] = gather_logical(param.grad, layout_of(param), mesh)
    return loss.item(), found


@pytest.mark.parametrize(
    ("name", "scheme"), mostly_thorough([("llama2", "int4"), ("llama2", "int8"), ("qwen2_moe", "int8")], [0, 2], [0])
)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=["fp32", "fp64"])
def test_gradients_are_those_over_dequantised_weights(
    tmp_path: Path, name: str, scheme: str, dtype: torch.dtype, most: float
) -> None:
    given = small(name, scheme, tmp_path)
    loss, found = gradients(0, 1, given, True, dtype, {})
    want_loss, want = gradients(0, 1, given, False, dtype, {})
    assert loss == pytest.approx(want_loss, rel=most) and found.keys() == want.keys()
    largest = max(float(g.abs().max()) for g in want.values())
    for key, grad in want.items():
        assert grad.abs().max() > 1e-3 * largest and (found[key] - grad).abs().max() < most * largest, key


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_cut_goes_through_words_and_groups(ranks: Any, folder: Path, sequence_parallel: bool) -> None:
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    _, want = gradients(0, 1, folder, False, torch.float64, {})
    of_ranks = [found for _, found in ranks(2).run(gradients, folder, True, torch.float64, layout)]
    for key, grad in want.items():
        column = "linear_qkv" in key or "linear_fc1" in key
        found = [each[key] for each in of_ranks]
        if sequence_parallel and key.endswith("lora_A") == column:  # whole on each rank: a sum over its own tokens
            found = [sum(found)]
        assert all(torch.allclose(each, grad, atol=1e-14) for each in found), key


def curve(rank: int, world: int, line: str) -> list[tuple[float, float]]:
    trainer = trainer_of(line, world, quiet=True)
    try:
        trainer.train()
    finally:
        trainer.close()
    return [(sum(report.losses.values()), float(report.grad_norm or 0)) for report in trainer.history]


LAYOUTS = [
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2",
    "--data-parallel-sharding-strategy optim_grads_params",
    "--data-parallel-sharding-strategy optim --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
]


@pytest.mark.parametrize("layout", mostly_thorough(LAYOUTS, [0, 2]))
def test_every_layout_trains_as_one_rank_beside_whole_weights(ranks: Any, folder: Path, layout: str) -> None:
    line = LINE.format(folder)
    want = curve(0, 1, line)
    for found in ranks(2).run(curve, f"{line} --lora-base {folder} {layout}"):
        for one, other in zip(found, want, strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def test_memory_of_packed_weights_is_predicted_and_counted(folder: Path, capsys: pytest.CaptureFixture) -> None:
    trainer = trainer_of(f"{LINE.format(folder)} --lora-base {folder} --log-memory-interval 1 --train-iters 1")
    trainer.train()
    trainer.close()
    said = capsys.readouterr().out.splitlines()
    predicted, counted = (next(text for text in said if word in text).split() for word in ("predicted ", "counted "))
    assert [float(x) for x in predicted[3:6]] == [float(x) for x in counted[1:4]]
    plain = sum(p.nbytes for p in trainer.model.parameters())
    packed = sum(p.nbytes for p in packed_of(trainer.model))
    assert packed and float(counted[1]) == pytest.approx((plain + packed) / 2**20, abs=0.006)


def test_a_checkpoint_has_the_adapters_and_finds_its_base(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A run is cut and goes on to the bit; what it has made generates, is exported, served and merged."""
    line = f"{LINE.format(folder)} --lora-base {folder} --save {tmp_path}"
    whole = curve(0, 1, f"{line}/whole")
    cut = curve(0, 1, f"{line}/cut --exit-interval 2")
    again = line.replace(f"--load {folder}", f"--load {tmp_path}/cut --use-checkpoint-args")
    assert cut + curve(0, 1, f"{again}/cut") == whole
    opened = open_model(tmp_path / "cut")
    mine = load(opened, Mesh.serial(), "fp32")
    plain = load(opened, Mesh.serial(), "fp32", packed=False)
    assert len(packed_of(mine)) == 8 and not packed_of(plain)
    made = [generate(Engine(m, EngineConfig(64, max_num_seqs=2)), PROMPTS, 8) for m in (mine, plain)]
    assert close(*made)
    with pytest.raises(ConfigError, match="beside packed weights are not merged") as caught:
        merge(mine)
    assert "--dequantize" in caught.value.fix
    merging = ["lora", "merge", "--load", str(tmp_path / "cut"), "--save", str(tmp_path / "merged")]
    capsys.readouterr()
    assert main(merging) == 2 and "a sum is no multiple of their scales" in capsys.readouterr().err
    assert main([*merging, "--dequantize"]) == 0
    merged = load(open_model(tmp_path / "merged"), Mesh.serial(), "fp32")
    assert close(generate(Engine(merged, EngineConfig(64, max_num_seqs=2)), PROMPTS, 8), made[0])
    assert main(["lora", "export", "--load", str(tmp_path / "cut"), "--save", str(tmp_path / "adapter")]) == 0
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def test_rollouts_are_drawn_beside_packed_weights(ranks: Any, folder: Path, tmp_path: Path) -> None:
    """The engine has the base in a layout of its own, and the adapters from the trainer; so has the reference."""
    from tests.serving.conftest import write_tokenizer  # which ranks need not import

    base = shutil.copytree(folder, tmp_path / "base")
    write_tokenizer(base)  # of as many words as the model has
    line = (
        f"--load {base} --lora-base {base} --lora-rank 3 --environment tests.posttraining.environments:Letters "
        "--grpo-prompts-per-step 2 --grpo-group-size 4 --max-completion-length 4 --global-batch-size 8 --train-iters 2 "
        "--micro-batch-size 4 --seq-length 32 --lr 1e-2 --lr-decay-style constant --grpo-kl-beta 0.1"
    )
    want = rewards(0, 1, line)
    layout = "--tensor-model-parallel-size 2 --rl-inference-tensor-model-parallel-size 2"
    assert ranks(2).run(rewards, f"{line} {layout}") == [want, want] and len(set(want)) > 1


def rewards(rank: int, world: int, line: str) -> list[float]:
    """Of the second rollout, and how far the engine is from the trainer in each step."""
    trainer = build_trainer(parse_args(shlex.split(line), world, task="grpo"), task=TASKS["grpo"], quiet=True)
    trainer.train()
    trainer.close()
    assert all(report.losses["layout gap"] < 1e-4 for report in trainer.history)
    return trainer.task.rollouts.rewards.tolist()


def test_another_base_is_refused(folder: Path, tmp_path: Path) -> None:
    line = f"{LINE.format(folder)} --lora-base {folder}"
    curve(0, 1, f"{line} --save {tmp_path}/run --train-iters 1")
    other = small("llama2", "int8", tmp_path)
    again = line.replace(f"--load {folder}", f"--load {tmp_path}/run --use-checkpoint-args")
    with pytest.raises(CheckpointError, match="contents of lora_base"):
        curve(0, 1, again.replace(f"--lora-base {folder}", f"--lora-base {other}"))
    with pytest.raises(ConfigError, match="two models"):
        curve(0, 1, line.replace(f"--lora-base {folder}", f"--lora-base {other}"))
    with pytest.raises(ConfigError, match="its weights are not packed"):
        parse_args(shlex.split(f"{LINE.format(folder)} --lora-base {tmp_path / 'whole'}"))
    with pytest.raises(ConfigError, match="lora_base without adapters"):
        parse_args(shlex.split(line.replace("--lora-rank 3", "")))
    with pytest.raises(ConfigError, match="begins with no weights"):
        parse_args(shlex.split(line.replace(f"--load {folder}", "--num-layers 2 --hidden-size 64")))
    weights = other / "model.safetensors"
    opened = open_model(tmp_path / "run")
    assert opened.words is not None
    moved = folder.with_name("moved")
    folder.rename(moved)
    try:
        with pytest.raises(CheckpointError, match="beside which the adapters were trained"):
            open_model(tmp_path / "run")
        folder.mkdir()
        for file in other.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        with pytest.raises(CheckpointError, match="has other weights than when") as caught:
            open_model(tmp_path / "run")
        assert weights.is_file() and "put the folder back" in caught.value.fix
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    finally:
        moved.rename(folder)
