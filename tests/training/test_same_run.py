"""A run that goes on is the one that ended: every field of a run is compared, or known to be harmless."""

from __future__ import annotations

import os
import shlex
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import numpy as np
import pytest
import torch

from labkit.ranks.torchrun import launch
from minimegatron.checkpoint.commit import complete
from minimegatron.checkpoint.manifest import NAME
from minimegatron.config.run import KINDS, OF_TASKS, RunConfig
from minimegatron.data.indexed import IndexedDatasetBuilder
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.launch.agreement import differences
from minimegatron.training import datasets, same_run
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from minimegatron.training.rules import batch_sizes
from minimegatron.training.same_run import MODEL, compare, facts_of, same_place
from minimegatron.training.trainer import Trainer
from tests.thorough import SLOW, mostly_thorough

# ------------------------------------------------------------------------------------------------ what is compared

LINE = (
    "--mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 2 --vocab-size 64 --seq-length 16 "
    "--micro-batch-size 1 --train-iters 10 --lr 1e-3"
)
FOUR = "--global-batch-size 4"


def run_of(line: str, world: int = 1, batch: str = FOUR, **facts: Any) -> tuple[RunConfig, dict[str, Any]]:
    """A run, and what it is told by."""
    run = parse_args(f"{LINE} {batch} {line}".split(), world)
    data = types.SimpleNamespace(
        trained_on=facts.get("trained_on", (("100 bytes (aa), documents 0 to 9", "here/x"),)),
        tokenizer=types.SimpleNamespace(identity=facts.get("tokenizer", "null:64")),
    )
    dp = run.parallel.data_parallel_size(world)
    return run, facts_of(run, batch_sizes(run.training, dp), data)


def state(line: str = "", world: int = 1, **facts: Any) -> dict[str, Any]:
    run, told = run_of(line, world, **facts)
    of_run = {name: value for name, value in told.items() if name not in MODEL}
    return {"model": run.model.to_dict(), "run": of_run, "seed": run.training.seed}


OTHER_RUNS = [
    ("", "--seed 7", "seed: checkpoint 1234, now 7"),
    ("", "--seq-length 32", "seq_length: checkpoint 16, now 32"),
    ("", "--global-batch-size 8", "global_batch_size: checkpoint 4, now 8"),
    ("", "--rampup-batch-size 2 2 10", "global_batch_size: checkpoint 4, now 2 4 over 10 samples"),
    ("", "--clip-grad 0.5", "clip_grad: checkpoint 1.0, now 0.5"),
    ("", "--optimizer sgd", "optimizer: checkpoint 'adam', now 'sgd'"),
    ("--optimizer sgd", "--optimizer sgd --sgd-momentum 0.5", "sgd_momentum: checkpoint 0.9, now 0.5"),
    ("", "--hidden-dropout 0", "hidden_dropout: checkpoint 0.1, now 0.0"),
    ("", "--freeze embedding.*", "freeze: checkpoint none, now embedding.*"),
    ("", "--decoupled-lr 1e-2", "decoupled_lr: checkpoint None, now 0.01"),
    ("--fp16", "--fp16 --loss-scale 64", "loss_scale: checkpoint None, now 64.0"),
]  # fmt: skip
OTHER_MODELS = [
    ("--num-layers 4", "num_layers: checkpoint 2, now 4"),
    ("--position-embedding-type rope", "position_embedding_type"),
    ("--bf16", "params_dtype: checkpoint 'fp32', now 'bf16'"),
]  # fmt: skip
SAME_RUN = [
    ("", "--train-iters 1000 --exit-interval 7 --save-interval 5 --save x --load x"),
    ("", "--micro-batch-size 4 --log-interval 5 --log-file x --eval-interval 5 --eval-iters 3"),
    ("", "--recompute-granularity full --attention-backend reference --kernels torch"),
    ("", "--lr 1e-2 --weight-decay 0.5 --lr-decay-style cosine"),
    ("", "--init-method-std 1 --bad-step skip --save x --spiky-loss-factor 3 --check-replicas-interval 2"),
    ("--optimizer sgd", "--optimizer sgd --adam-beta1 0.5"),
    ("", "--initial-loss-scale 4 --hysteresis 3"),
    ("", "--muon-momentum 0.5 --rotary-base 5"),
    ("", "--sample-order megatron --data-cache-path x --tensorboard-dir x"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "now", "said"), OTHER_RUNS, ids=[now for _, now, _ in OTHER_RUNS])
def test_another_run_is_refused_or_accepted_aloud(before, now, said):
    other = run_of(now)
    with pytest.raises(CheckpointError, match="the checkpoint is of another run") as caught:
        compare(state(before), *other, weights_only=False)
    assert said in caught.value.what and "--override-checkpoint-args" in caught.value.fix
    assert str(caught.value).count("\n") < 6
    assert compare(state(before), *other, weights_only=True) == "", "a new run takes the weights"
    accepted = run_of(f"{now} --load x --override-checkpoint-args")
    assert said in compare(state(before), *accepted, weights_only=False)


@pytest.mark.parametrize(("now", "said"), OTHER_MODELS, ids=[now for now, _ in OTHER_MODELS])
@pytest.mark.parametrize("weights_only", [False, True])
def test_another_model_is_refused_whatever_is_taken(now, said, weights_only):
    with pytest.raises(CheckpointError, match="the checkpoint is of another model") as caught:
        compare(state(), *run_of(now), weights_only)
    assert said in caught.value.what and "--finetune" not in caught.value.fix


@pytest.mark.parametrize(("before", "now"), SAME_RUN, ids=[now for _, now in SAME_RUN])
def test_what_is_harmless_is_not_asked_for(before, now):
    assert compare(state(before), *run_of(now), weights_only=False) == ""


def test_the_next_sample_has_to_be_that_of_the_checkpoint():
    saved = {"counters": {"consumed_train_samples": 12}, "next_sample": "aa"}
    for known, now in (
        (saved, "aa"),
        (saved, ""),
        (saved | {"next_sample": ""}, "bb"),
        ({"counters": saved["counters"]}, "bb"),
    ):
        assert same_place(known, lambda sample, now=now: now, False) == ""
    with pytest.raises(CheckpointError, match="sample 12, the next of the training set, has other tokens"):
        same_place(saved, lambda sample: f"of {sample}", False)
    assert "samples may be read twice" in same_place(saved, lambda sample: "bb", True)


OF_A_BERT = "--preset bert-base --max-position-embeddings 64 --ffn-hidden-size 64"
OF_A_T5 = (
    "--preset t5-small --encoder-num-layers 1 --kv-channels 16 --decoder-start-token-id 164 --decoder-seq-length 6 "
    "--ffn-hidden-size 64 --vocab-size 165"
)


@pytest.mark.parametrize("model", ["", OF_A_BERT, OF_A_T5], ids=["GPT", "BERT", "T5"])
def test_a_place_in_the_data_is_known_by_its_tokens(model):
    trainer = build_trainer(parse_args(f"{LINE} {FOUR} {model}".split()), quiet=True)
    first, again, other = (datasets.tokens_of(trainer.train_set, k) for k in (3, 3, 4))
    assert first == again != other and len(first) == len(other) > 8
    assert datasets.tokens_of(trainer.train_set, len(trainer.train_set)) == ""
    assert trainer.run_state.values()["next_sample"] == datasets.tokens_of(trainer.train_set, 0)
    trainer.close()


def test_another_layout_is_the_same_run():
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --order tp-cp-ep-pp-dp"
    assert compare(state(), *run_of(layout, 4), weights_only=False) == ""
    with pytest.raises(CheckpointError, match="global_batch_size: checkpoint 2, now 1"):
        compare(state("", 2, batch=""), *run_of("", batch=""), weights_only=False)


def test_data_and_tokenizer_are_known_by_what_they_hold():
    moved = run_of("", trained_on=(("100 bytes (aa), documents 0 to 9", "elsewhere/y"),))
    assert compare(state(), *moved, weights_only=False) == ""
    for facts, said in [
        (
            {"trained_on": (("100 bytes (bb), documents 0 to 9", "here/x"),)},
            "here/x, 100 bytes (aa), documents 0 to 9, now",
        ),
        ({"trained_on": (("100 bytes (aa), documents 0 to 8", "here/x"),)}, "documents 0 to 9, now here/x"),
        ({"tokenizer": "bytes:258"}, "tokenizer: checkpoint 'null:64', now 'bytes:258'"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            compare(state(), *run_of("", **facts), weights_only=False)
        assert said in caught.value.what


def test_what_a_checkpoint_does_not_say_is_named():
    old = state()
    del old["run"]
    said = compare(old, *run_of("--clip-grad 0.5"), weights_only=False)
    assert said.startswith("not in the checkpoint, so not compared: ") and "clip_grad" in said and "tokenizer" in said
    assert "num_layers" not in said and "seed" not in said and "train_iters" not in said
    with pytest.raises(CheckpointError, match="seed: checkpoint 1234, now 5"):
        compare(old, *run_of("--seed 5"), weights_only=False)
    assert compare(old, *run_of("--clip-grad 0.5"), weights_only=True) == ""


# ------------------------------------------------------------------------------------------------ in a run


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("files")
    for name, seed in (("a", 0), ("b", 1)):
        rng = np.random.RandomState(seed)
        with IndexedDatasetBuilder(folder / f"{name}.bin", np.uint16) as builder:
            for _ in range(10):
                ids = rng.randint(0, 63, rng.randint(10, 30))
                builder.add_document(ids, [len(ids)])
            builder.finalize(folder / f"{name}.idx")
    return folder


def trained(files: Any, data: str, line: str = "", quiet: bool = True) -> Trainer:
    flags = LINE.replace("--mock-data", "--tokenizer-type NullTokenizer").replace("--vocab-size 64", "--vocab-size 63")
    flags += f" {FOUR} {line} --data-path {data.replace('FILES', str(files))}"
    trainer = build_trainer(parse_args(flags.split()), quiet=quiet)
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


ONE, TWO = "FILES/a --split 100", "0.5 FILES/a 0.5 FILES/b --split 100"
OTHER_DATA = {
    ONE: ["FILES/b --split 100", "FILES/a --split 80,20"],
    TWO: ["0.5 FILES/b 0.5 FILES/a --split 100", "0.6 FILES/a 0.4 FILES/b --split 100", ONE],
}


@pytest.mark.parametrize("before", OTHER_DATA)
def test_other_data_is_another_run(tmp_path, files, before):
    trained(files, before, f"--exit-interval 1 --save {tmp_path}")
    for now in OTHER_DATA[before]:
        with pytest.raises(CheckpointError, match="another run:\n  training data: checkpoint "):
            trained(files, now, f"--load {tmp_path}")
    after = trained(files, before, f"--load {tmp_path} --exit-interval 2")
    assert after.state.iteration == 2
    tuned = trained(files, OTHER_DATA[before][0], f"--load {tmp_path} --finetune --exit-interval 1")
    assert tuned.state.consumed_train_samples == 4


def without_what_is_new(root: Any) -> None:
    """Make a folder's checkpoints those of an older version."""
    for step, manifest in complete(root).items():
        del manifest.state["run"], manifest.state["joint_samples"]
        (root / f"iter_{step:07d}" / NAME).write_bytes(manifest.dumps())


def curve(trainer: Trainer) -> list[tuple[float, float | None]]:
    return [(report.losses["lm loss"], report.grad_norm) for report in trainer.history]


DATA = ["FILES/a --split 100", "0.7 FILES/a 0.3 FILES/b --split 100"]
LONG = "--lr-decay-iters 30 --override-opt-param-scheduler"


@SLOW
@pytest.mark.parametrize("data", mostly_thorough(DATA, [1]))
def test_a_run_that_is_made_longer_is_the_longer_run(tmp_path, files, data):
    """4 samples a step of files of about 12: several epochs of each."""
    whole = trained(files, data, "--train-iters 30 --lr-decay-iters 30")
    first = trained(files, data, f"--train-iters 7 --lr-decay-iters 30 --exit-interval 3 --save {tmp_path}")
    again = trained(files, data, f"--train-iters 12 {LONG} --load {tmp_path} --save {tmp_path} --exit-interval 10")
    after = trained(files, data, f"--train-iters 30 {LONG} --load {tmp_path}")
    assert curve(first) + curve(again) + curve(after) == curve(whole)
    assert all(epochs > 2 for epochs in whole.train_set.read_epochs(120).values())


@SLOW
@pytest.mark.parametrize("data", mostly_thorough(DATA, [1]))
def test_an_old_run_goes_on_in_the_order_in_which_it_began(tmp_path, files, data):
    whole = trained(files, data, "--train-iters 10 --lr-decay-iters 30 --sample-order megatron")
    assert curve(whole) != curve(trained(files, data, "--train-iters 10 --lr-decay-iters 30"))
    trained(files, data, f"--lr-decay-iters 30 --sample-order megatron --exit-interval 3 --save {tmp_path}")
    without_what_is_new(tmp_path)
    after = trained(files, data, f"--lr-decay-iters 30 --load {tmp_path}")
    assert curve(after) == curve(whole)[3:]
    longer = trained(files, data, f"--train-iters 25 {LONG} --load {tmp_path} --save {tmp_path} --exit-interval 11")
    assert curve(longer)[:7] == curve(whole)[3:], "made longer, it is the same as far as it went"
    goes_on = trained(files, data, f"--train-iters 40 {LONG} --load {tmp_path} --exit-interval 25")
    assert curve(goes_on) == curve(trained(files, data, f"--train-iters 25 {LONG} --load {tmp_path}"))


# ------------------------------------------------------------------------------------------------ what is said


def said_by(capsys: Any, *words: str) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if any(word in line for word in words)]


@pytest.mark.slow
def test_the_log_says_how_many_epochs_there_are_and_where_they_begin(files, capsys):
    run = trained(files, "FILES/a --split 100", "--train-iters 9", quiet=False)
    (head, *lines) = said_by(capsys, "epoch")
    read = 36 * 16 / run.train_set.epochs.tokens
    assert head == f"epochs: the run reads {read:.3g} of its training data" and 2 < read < 3
    places = [next(k for k in range(36) if run.train_set.epoch_of(k) == epoch) for epoch in (1, 2)]
    assert lines == [f"epoch {e} of 3 begins in iteration {k // 4 + 1}" for e, k in zip((2, 3), places, strict=True)]
    trained(files, "FILES/a --split 100", "--train-iters 9 --log-interval 9", quiet=False)
    assert said_by(capsys, "epoch ") == lines[-1:], "of several between two lines of the log the last"


@pytest.mark.slow
def test_of_a_blend_each_file_has_its_epochs(files, capsys):
    run = trained(files, "0.8 FILES/a 0.2 FILES/b --split 100", "--train-iters 9", quiet=False)
    head, *lines = said_by(capsys, "epoch")
    a, b = run.train_set.read_epochs(36).items()
    assert head == f"epochs: the run reads {a[1]:.3g} of {a[0]}, {b[1]:.3g} of {b[0]}" and a[1] > 2 > 1 > b[1]
    named = [line.partition(" begins in ")[0] for line in lines]
    assert named == [f"epoch 2 of 3 of {files}/a", f"epoch 3 of 3 of {files}/a"]


def test_a_test_set_without_a_document_is_left_out_aloud(files, capsys):
    line = "--train-iters 1 --eval-interval 1 --eval-iters 1"
    trained(files, "FILES/a --split 80,19,1", line, quiet=False)
    found = said_by(capsys, "test set", "on validation set")
    assert found == ["test set: none, --split 80,19,1 leaves it no document"]
    trained(files, "FILES/a --split 80,10,10", line, quiet=False)
    assert len(found := said_by(capsys, "test set")) == 1 and "test loss" not in found and "on test set" in found[0]


@pytest.mark.slow
def test_a_resumed_run_may_evaluate_less_than_before(tmp_path, files):
    """It has consumed more validation samples than the shorter evaluations of the rest would ask for."""
    data = "FILES/a --split 80,20"
    trained(files, data, f"--eval-interval 1 --eval-iters 5 --exit-interval 8 --save {tmp_path}")
    after = trained(files, data, f"--eval-interval 1 --eval-iters 1 --load {tmp_path}")
    assert after.state.iteration == 10 and after.state.consumed_valid_samples == 8 * 20 + 2 * 4


# ------------------------------------------------------------------------------------------------ the same on all ranks


TINY = "--mock-data --seq-length 16 --hidden-size 32 --num-attention-heads 2 --vocab-size 64 --train-iters 2"


def of_rank(line: str = "") -> dict[str, Any]:
    return same_run.rank_facts(parse_args(shlex.split(f"{TINY} {line}")))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--seed 7", "seed is 1234 on rank 0 and 7 on rank 1"),
        ("--global-batch-size 2", "global_batch_size is None on rank 0 and 2 on rank 1"),
        ("--bf16", "params_dtype is fp32 on rank 0 and bf16 on rank 1"),
    ],
)
def test_one_flag_is_named(line: str, said: str) -> None:
    assert said in differences([of_rank(), of_rank(line)])


def test_every_field_is_compared_or_its_freedom_has_a_reason() -> None:
    of_tasks = {*OF_TASKS, "task_name"}
    assert set(of_rank()) & set(KINDS) == set(KINDS) - set(same_run.RANK_LOCAL) - of_tasks
    assert "log_file" in same_run.RANK_LOCAL and "seed" not in same_run.RANK_LOCAL
    assert not differences([of_rank(), of_rank("--log-file a.jsonl --profile-dir b --data-cache-path c")])


def test_versions_and_an_edited_source_file_are_named(tmp_path: Path) -> None:
    here = of_rank()
    with mock.patch.object(torch, "__version__", "2.11.0"), mock.patch.object(numpy, "__version__", "1.0"):
        said = " ".join(differences([here, of_rank()]))
    assert "version of torch is " in said and "2.11.0 on rank 1" in said and "version of numpy is" in said
    real = Path.read_bytes
    with mock.patch.object(Path, "read_bytes", lambda p: real(p) + b"#" * (p.name == "clip.py")):
        assert [text.partition(" is ")[0] for text in differences([here, of_rank()])] == ["minimegatron/optim/clip.py"]


def test_the_file_of_a_spec_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    for text in ("a = 1\n", "a = 2\n"):
        (tmp_path / "a_spec_of_ours.py").write_text(text)
        seen.append(of_rank("--spec a_spec_of_ours f"))
    assert [text.partition(" is ")[0] for text in differences(seen)] == ["source of the spec"]


@pytest.mark.parametrize("size", [0, 10, datasets.BLOCK_BYTES, 5 * datasets.BLOCK_BYTES + 3])
def test_a_data_file_is_told_by_its_size_and_its_ends(tmp_path: Path, size: int) -> None:
    path = tmp_path / "data.bin"
    seen = set()
    for change in (None, 0, size // 2, size - 1):
        raw = bytearray(size)
        if size and change is not None:
            raw[change] = 1
        path.write_bytes(raw)
        seen.add(datasets.file_fact(str(path)))
    path.write_bytes(bytes(size + 1))
    seen.add(datasets.file_fact(str(path)))
    assert len(seen) == (5 if size else 2)


def load_other_data(rank: int, world: int, folder: str) -> str:
    """Rank 1's node has another copy of the data under the same name."""
    from minimegatron.comm.mesh import Mesh
    from minimegatron.training.datasets import load_data

    os.chdir(os.path.join(folder, str(rank)))
    line = "--data-path words --tokenizer-type NullTokenizer --vocab-size 300 --seq-length 4 --hidden-size 32"
    run = parse_args(shlex.split(f"{line} --num-attention-heads 2"), world)
    with pytest.raises(ConfigError) as caught:
        load_data(run, Mesh.build(run.parallel), (2, 0, 0))
    return caught.value.what


def test_another_copy_of_the_data_is_named(ranks: Any, tmp_path: Path) -> None:
    from minimegatron.data.indexed import IndexedDatasetBuilder

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        with IndexedDatasetBuilder(tmp_path / str(rank) / "words.bin", numpy.uint16) as builder:
            for document in range(20):
                builder.add_document([document + rank, 1, 2, 3, 4], [5])
            builder.finalize(tmp_path / str(rank) / "words.idx")
    for said in ranks(2).run(load_other_data, str(tmp_path), timeout=30):
        assert said.startswith("the ranks were not given the same: data file 0 (words.bin) is 200 bytes ("), said
        assert said.count("data file") == 1


@pytest.mark.thorough
def test_the_command_ends_with_2_and_one_message(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, shlex\n"
        "from minimegatron.commands.pretrain_gpt import main\n"
        f"main(shlex.split({TINY!r}) + ['--hidden-size', '64'][: 2 * (os.environ['RANK'] == '1')])\n"
    )
    run = launch(script, 2, tmp_path / "run", timeout=60)
    assert run.returncode == 2, run.explain()
    said = "ConfigError: the ranks were not given the same: "
    assert said in run.explain() and "hidden_size is 32 on rank 0 and 64 on rank 1" in run.explain()
    assert "".join(run.stderr).count("the ranks were not given the same") == 1
