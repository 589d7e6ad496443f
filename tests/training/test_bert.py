"""BERT from the command line: it learns from text, is saved, goes on in other layouts, is published and planned."""

from __future__ import annotations

import json

import pytest
import torch

from minimegatron.checkpoint.conversion import open_model
from minimegatron.checkpoint.hf_folder import open_published
from minimegatron.commands.convert import main as convert
from minimegatron.planner.cluster import CLUSTERS
from minimegatron.planner.planning import plan
from minimegatron.training.arguments import parse_args
from tests.thorough import SLOW, THOROUGH
from tests.training.test_trainer import TINY, history_on_rank, numbers, validation_on_rank

LINE = (
    "--preset bert-base --num-layers 2 --ffn-hidden-size 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--global-batch-size 4 --lr-decay-iters 4 --seq-length 32"
)
TP2, PP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def text(docs_corpus) -> str:
    """Of a model with 515 ids the tokenizer has 512: three are the marks."""
    return f"--corpus stdlib-docs --corpus-path {docs_corpus} --vocab-size 515"


@SLOW
def test_a_run_goes_on_in_other_layouts_and_is_published(ranks, text, tmp_path):
    """Two steps on one rank, the third over tp, the fourth in a pipeline; rows have paddings of their own."""
    flags = f"{text} {LINE}"
    whole = history_on_rank(0, 1, f"{flags} --train-iters 4")
    assert all({"lm loss", "sop loss"} == report.losses.keys() for report in whole)
    line = f"{flags} --save-interval 1 --save {tmp_path / 'run'}"
    history_on_rank(0, 1, f"{line} --train-iters 2")
    line += f" --load {tmp_path / 'run'}"
    parts = [
        ranks(2).run(history_on_rank, f"{line} --train-iters {steps} {layout}")[0]
        for steps, layout in ((3, TP2), (4, PP2))
    ]
    for got, want in zip((*parts[0], *parts[1]), whole[2:], strict=True):
        assert got.losses == pytest.approx(want.losses, rel=1e-5) and got.num_tokens == want.num_tokens
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-4)
    convert(["--load", str(tmp_path / "run"), "--save", str(tmp_path / "hf"), "--to", "hf", "--hf-model", "none"])
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert said["architectures"] == ["BertForPreTraining"] and said["vocab_size"] == 515
    ours, theirs = open_model(tmp_path / "run").weights, open_published(tmp_path / "hf")[2]
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in theirs.tensors)


@SLOW
def test_it_learns_the_words_of_the_standard_library(text):
    """In 60 steps the loss falls from 6.25, which is log V, to between 4.8 and 5, as three seeds say."""
    flags = f"{text} {LINE} --lr-decay-iters 60 --global-batch-size 16 --micro-batch-size 16 --bert-head lm"
    history = numbers(history_on_rank(0, 1, f"{flags} --train-iters 60"))
    assert sum(loss for loss, _ in history[-5:]) / 5 < history[0][0] - 0.7


@THOROUGH
def test_its_evaluation_is_the_same_with_context_parallelism(ranks, text):
    line = f"{text} {LINE} --eval-interval 1 --eval-iters 2"
    serial = validation_on_rank(0, 1, line)
    assert serial.keys() == {"lm loss", "sop loss"}
    for cut in ranks(2).run(validation_on_rank, f"{line} --context-parallel-size 2"):
        assert cut == pytest.approx(serial, rel=1e-5)


@THOROUGH
@pytest.mark.timeout(120)
def test_it_is_planned():
    line = [*TINY.split(), "--mock-data", *LINE.split(), *TP2.split()]
    told = plan(parse_args(line, 2), 2, CLUSTERS["h100"])
    assert not any(memory.unknown for memory in told.memory.values()) and told.bytes > 0
