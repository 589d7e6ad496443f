"""`minimegatron checkpoint`: what it says of whole, damaged and differing checkpoints, and its exit status."""

from __future__ import annotations

import shutil

import pytest
import torch

from minimegatron.cli import main
from minimegatron.layers.param import logical_parameters
from tests.training.test_trainer import trainer_of

LINE = "--num-layers 1 --micro-batch-size 1 --global-batch-size 2 --train-iters 4 --eval-iters 1 --eval-interval 2"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "a"
    trainer = trainer_of(f"{LINE} --save {root} --save-interval 2")
    trainer.train()
    trainer.close()
    return root


@pytest.fixture
def root(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "a")
    return tmp_path / "a"


def said(capsys, *words) -> tuple[int, str, str]:
    status = main(["checkpoint", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_inspect_names_the_step_the_run_the_configuration_and_the_tensors(root, capsys):
    status, out, _ = said(capsys, "inspect", root, "--tensors", "--prefix", "optimizer.exp_avg.")
    assert status == 0 and "step 4 of run" in out and "hidden_size 32" in out and "iteration 4" in out
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["step", "2", "4"]
    assert "validation loss" in out and " nan" not in out
    assert "F32     64×32                      1     1  optimizer.exp_avg.embedding.word_embeddings.weight" in out
    assert "optimizer.exp_avg_sq.embedding" not in out
    assert f"{root / 'iter_0000002'}: step 2" in said(capsys, "inspect", root / "iter_0000002")[1]
    assert f"{root / 'iter_0000002'}: step 2" in said(capsys, "inspect", root, "--step", 2)[1]


def test_verify_says_of_each_whether_it_is_whole(root, capsys):
    status, out, _ = said(capsys, "verify", root)
    assert status == 0 and out.count("whole, 1 files") == 2
    shard = next((root / "iter_0000002").glob("shard*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    status, out, err = said(capsys, "verify", root)
    assert status == 3 and "iter_0000002: damaged" in out and "iter_0000004: whole" in out and str(shard) in err
    assert said(capsys, "verify", root, "--step", 4)[0] == 0
    (root / "iter_0000004/manifest.json").unlink()
    status, out, err = said(capsys, "inspect", root)
    assert status == 3 and "         4  damaged: there is no manifest" in out


def test_diff_names_what_differs_and_by_how_much(root, tmp_path, capsys):
    status, out, _ = said(capsys, "diff", root, root)
    assert status == 0 and "to the bit" in out
    status, out, _ = said(capsys, "diff", root / "iter_0000002", root / "iter_0000004")
    assert status == 1 and "counters.iteration: 2 and 4" in out and "rng.default.cpu: largest difference" in out
    trainer = trainer_of(f"{LINE} --load {root} --save {tmp_path}/b --no-save-rng")
    named = dict(logical_parameters(trainer.model))
    with torch.no_grad():
        named["decoder.final_layernorm.weight"][3] += 0.5
    trainer.checkpoints.save()
    trainer.close()
    status, out, _ = said(capsys, "diff", root, tmp_path / "b", "--prefix", "model.")
    first, *rest = out.splitlines()
    assert status == 1 and rest == []
    assert first.startswith("model.decoder.final_layernorm.weight: largest difference 0.5 in 1 of 32 numbers")
    assert f"only in {root / 'iter_0000004'}: rng." in said(capsys, "diff", root, tmp_path / "b")[1]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["inspect", "nowhere"], 3, "no checkpoint"),
        (["verify", "{root}", "--step", "3"], 3, "there are 2, 4"),
        (["mend", "{root}"], 2, "invalid choice"),
        ([], 2, "required"),
        (["diff", "{root}"], 2, "required: other"),
    ],
)
def test_what_is_not_there_or_not_meant(saved, capsys, words, status, message):
    found, _, err = said(capsys, *[word.format(root=saved) for word in words])
    assert found == status and message in err


def test_help_fits_the_terminal(capsys):
    with pytest.raises(SystemExit):
        main(["checkpoint", "--help"])
    text = capsys.readouterr().out
    assert "exit status" in text and max(map(len, text.splitlines())) <= 100
