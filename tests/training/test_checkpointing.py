"""The options of checkpoints: which are written, which are kept, what is continued, and what is refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from minimegatron.checkpoint import commit
from minimegatron.checkpoint import save as saves
from minimegatron.checkpoint.commit import Keep, RootLock, complete, published, retire
from minimegatron.checkpoint.load import CheckpointFiles
from minimegatron.checkpoint.manifest import NAME
from minimegatron.config.run import CheckpointConfig
from minimegatron.errors import CheckpointError, ConfigError, RankError
from minimegatron.training.checkpointing import Checkpoints
from tests.faults import helpers
from tests.thorough import mostly_thorough
from tests.training.test_trainer import numbers, trainer_of, with_sigterm

LINE = (
    "--num-layers 1 --micro-batch-size 1 --global-batch-size 2 --train-iters 6 --lr-decay-iters 6 "
    "--hidden-dropout 0.1 --attention-dropout 0.1"
)


def run(line: str, world: int = 1):
    trainer = trainer_of(f"{LINE} {line}", world)
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved") / "root"
    run(f"--save {root} --save-interval 2")
    return root


@pytest.fixture
def root(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "root")
    return tmp_path / "root"


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ("", [6]),
        ("--save-interval 4", [4, 6]),
        ("--save-interval 1 --save-keep-last 1 --async-save", [6]),
        ("--save-interval 1 --save-retain-interval 4 --save-keep-last 2", [4, 5, 6]),
        ("--save-interval 2 --exit-interval 3", [2, 3]),
    ],
)
def test_which_are_written_and_which_stay(tmp_path, options, steps):
    run(f"--save {tmp_path} {options}")
    assert published(tmp_path) == steps == list(complete(tmp_path))


def test_the_best_one_stays(root):
    losses = {2: 0.25, 4: 0.125, 6: 0.5}
    for step, manifest in complete(root).items():
        manifest.state["validation_loss"] = losses[step]
        (root / f"iter_{step:07d}" / NAME).write_bytes(manifest.dumps())
    assert retire(root, Keep(newest=2, best=True)) == [2] and published(root) == [4, 6]
    assert retire(root, Keep(newest=1, best=True)) == [] and published(root) == [4, 6]
    assert retire(root, Keep(newest=1)) == [4]


def test_a_checkpoint_after_an_evaluation_knows_its_loss(tmp_path):
    trainer = run(f"--save {tmp_path} --save-interval 1 --eval-interval 2 --eval-iters 1 --save-keep-best "
                  "--save-keep-last 1")  # fmt: skip
    known = {step: m.state["validation_loss"] for step, m in complete(tmp_path).items()}
    assert known[6] is not None and all(loss is not None for loss in known.values()) and len(known) in (1, 2)
    assert known[6] == trainer.state.validation_loss == pytest.approx(known[6])


def test_a_damaged_old_one_is_not_removed(root):
    (root / "iter_0000002" / NAME).write_text("{}")
    assert retire(root, Keep(newest=1)) == [4] and published(root) == [2, 6]


# ------------------------------------------------------------------------------------------------ what is continued


def test_the_newest_and_the_one_that_is_asked_for(root, tmp_path):
    whole = run("")
    for option, first in (("--ckpt-step 2", 2), ("--ckpt-step 4", 4), ("", 6)):
        after = run(f"--load {root} {option}")
        assert numbers(after.history) == numbers(whole.history)[first:]
        assert after.state.iteration == 6 and after.state.consumed_train_samples == 12


@pytest.mark.slow
def test_the_weights_without_the_rest(root):
    plain = run(f"--load {root} --ckpt-step 2 --exit-interval 2")
    fresh = run(f"--load {root} --ckpt-step 2 --no-load-optim")
    assert fresh.state.iteration == 6 and len(fresh.history) == 4
    assert numbers(fresh.history)[0][0] == numbers(plain.history)[0][0], "the same weights and the same dropout"
    assert numbers(fresh.history)[-1] != numbers(run(f"--load {root} --ckpt-step 2").history)[-1]
    other = run(f"--load {root} --ckpt-step 2 --no-load-rng")
    assert numbers(other.history)[0][0] != numbers(plain.history)[0][0], "another dropout"
    tuned = run(f"--load {root} --ckpt-step 2 --finetune")
    assert tuned.state.iteration == 6 and len(tuned.history) == 6 and tuned.state.consumed_train_samples == 12


def test_what_was_not_saved_is_not_made_up(tmp_path):
    run(f"--save {tmp_path} --no-save-optim --no-save-rng --exit-interval 2")
    assert {name.split(".")[0] for name in complete(tmp_path)[2].tensors} == {"model"}
    with pytest.raises(CheckpointError, match="saved without optimizer state") as caught:
        run(f"--load {tmp_path}")
    assert "--no-load-optim" in str(caught.value)
    with pytest.raises(CheckpointError, match="saved without rng state"):
        run(f"--load {tmp_path} --no-load-optim")
    assert len(run(f"--load {tmp_path} --no-load-optim --no-load-rng").history) == 4
    assert len(run(f"--load {tmp_path} --finetune").history) == 6


def test_nothing_to_load(tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        assert len(run(f"--load {folder}").history) == 6
        with pytest.raises(CheckpointError, match="no checkpoint"):
            run(f"--load {folder} --exit-on-missing-checkpoint")
        with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
            run(f"--load {folder} --ckpt-step 3")


def test_a_damaged_newest_one_is_named_with_an_older_one(root):
    (root / "iter_0000006" / NAME).unlink()
    with pytest.raises(CheckpointError) as caught:
        run(f"--load {root}")
    assert "iter_0000006" in str(caught.value) and "--ckpt-step 4" in str(caught.value)
    assert len(run(f"--load {root} --ckpt-step 4").history) == 2
    shard = next((root / "iter_0000004").glob("shard*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="its hash differs") as caught:
        run(f"--load {root} --ckpt-step 4")
    assert str(shard) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--optimizer sgd", "optimizer: checkpoint 'adam', now 'sgd'"),
        (
            "--optimizer sgd --override-checkpoint-args",
            "optimizer.momentum_buffer.embedding.word_embeddings.weight is not in it",
        ),
    ],
)
def test_another_model_or_optimizer(root, options, message):
    with pytest.raises(CheckpointError) as caught:
        run(f"--load {root} {options}")
    assert message in str(caught.value)


def run_on_rank(rank: int, world: int, line: str) -> None:
    run(line, world)


@pytest.mark.slow
def test_what_one_rank_misses_is_said_by_all(ranks, tmp_path):
    """Only the last stage of two has the final norm."""
    root, folder = tmp_path, tmp_path / "iter_0000006"
    run(f"--num-layers 2 --save {root}")
    manifest = complete(root)[6]
    del manifest.tensors["model.decoder.final_layernorm.weight"]
    (folder / NAME).write_bytes(manifest.dumps())
    with pytest.raises(RankError, match="^ranks 0-1 raised CheckpointError: the checkpoint does not fit") as caught:
        ranks(2).run(run_on_rank, f"--num-layers 2 --pipeline-model-parallel-size 2 --load {root}")
    assert "model.decoder.final_layernorm.weight is not in it" in str(caught.value)


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "options",
    ["--save-interval 2", "--async-save", "--ckpt-step 2", "--finetune", "--save f --save-keep-best",
     "--save-retain-interval 2", "--exit-on-missing-checkpoint"],
)  # fmt: skip
def test_options_without_what_they_need(options):
    with pytest.raises(ConfigError, match="without"):
        trainer_of(f"{LINE} {options}")


def test_a_run_that_would_come_to_a_step_that_is_there(root):
    for options in (f"--save {root}", f"--save {root} --load {root} --ckpt-step 2", f"--save {root} --load {root} "
                    "--finetune"):  # fmt: skip
        with pytest.raises(CheckpointError, match="and there are checkpoints of") as caught:
            run(options)
        assert f"--load {root}" in str(caught.value)
    trainer = run(f"--save {root} --load {root}")
    assert trainer.history == [] and published(root) == [2, 4, 6]


def test_two_runs_with_one_folder(tmp_path):
    holder = os.fork()
    if not holder:
        try:
            lock = RootLock(tmp_path, "first")
            (tmp_path / "held").touch()
            time.sleep(1000)
            lock.close()
        finally:
            os._exit(1)
    try:
        helpers.wait_for((tmp_path / "held").exists, 20, "the lock to be held")
        with pytest.raises(CheckpointError) as caught:
            run(f"--save {tmp_path}")
        assert f"run first, process {holder} on {os.uname().nodename} since" in str(caught.value)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    assert (tmp_path / ".lock").read_text().startswith("run first"), "what is left of the dead holder"
    RootLock(tmp_path, "second").close()
    run(f"--save {tmp_path} --train-iters 2 --lr-decay-iters 2")
    assert published(tmp_path) == [2]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        run(f"--save {tmp_path}/file/below")


# ------------------------------------------------------------------------------------------------ removed meanwhile


@contextlib.contextmanager
def happens(event, at: int):
    """Call `event` before the operation number `at` of all that read the disk; the count."""
    count = [0]

    def counted(real):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == at:
                event()
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("iterdir", "open", "stat", "exists", "is_dir", "is_file"):  # 3.14 asks no stat for the last three
            patch.setattr(Path, name, counted(getattr(Path, name)))
        yield count


@pytest.mark.slow
def test_a_load_of_what_another_run_removes_takes_its_next(root, saved):
    trainer = trainer_of(LINE)
    four, six = root / "iter_0000004", root / "iter_0000006"
    removed, found, at, count = root / ".iter_0000004.retired", set(), 0, [0]
    while count[0] >= at:
        at += 1
        shutil.rmtree(six, ignore_errors=True)
        shutil.rmtree(removed, ignore_errors=True)
        shutil.copytree(saved / four.name, four, dirs_exist_ok=True)
        with happens(lambda: (shutil.copytree(saved / six.name, six), four.rename(removed)), at) as count:
            assert Checkpoints(CheckpointConfig(load=str(root)), trainer.run_state, lambda _: None).load()
        found.add(trainer.state.iteration)
        assert trainer.scheduler.num_steps == 2 * trainer.state.iteration
    assert found == {4, 6} and at > 10


def removed_when_rank_zero_looks(rank: int, world: int, root: str, newer: str) -> int:
    """Load; where rank 0 is about to list the files, another run has removed the newest and published the next."""
    trainer, real = trainer_of(LINE, world), commit.verify_names

    def verify_names(folder, manifest):
        if folder.name == "iter_0000004":
            shutil.copytree(newer, folder.with_name("iter_0000006"))
            shutil.rmtree(folder)
        real(folder, manifest)

    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "verify_names", verify_names)
        Checkpoints(CheckpointConfig(load=root), trainer.run_state, shown.append).load()
    assert shown[0] == "another run has removed the checkpoint of iteration 4 while it was read"
    return trainer.state.iteration


def test_all_ranks_take_the_next_together(ranks, root, saved):
    shutil.rmtree(root / "iter_0000006")
    assert ranks(2).run(removed_when_rank_zero_looks, str(root), str(saved / "iter_0000006"), timeout=60) == [6, 6]


# ------------------------------------------------------------------------------------------------ in the background


def failing(rank: int, world: int, root: str, victim: int, when: str) -> int:
    """Train with saves in the background, one of which fails on one rank; returns the steps taken when it is known."""
    real = saves.write_shard

    def write(file, tensors, metadata):
        if rank == victim and metadata["step"] == when:
            raise OSError(28, "No space left on device")
        return real(file, tensors, metadata)

    saves.write_shard = write
    trainer = trainer_of(f"{LINE} --async-save --save {root} --save-interval 2 --use-distributed-optimizer", world)
    try:
        trainer.train()
    finally:
        saves.write_shard = real
        trainer.close()
    return trainer.state.iteration


@pytest.mark.parametrize(
    ("victim", "when", "left"),
    mostly_thorough([(0, "4", [2]), (1, "2", []), (1, "6", [2, 4])], [0, 1], [1]),
)
def test_an_error_in_the_background_is_raised_on_all_ranks(ranks, tmp_path, victim, when, left):
    with pytest.raises(RankError) as caught:
        ranks(2).run(failing, str(tmp_path), victim, when)
    assert "No space left on device" in str(caught.value) and f"rank {victim} " in str(caught.value)
    assert "bytes cannot be written" in str(caught.value) and "bytes are free" in str(caught.value)
    assert published(tmp_path) == left
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == [".lock"]


def test_what_is_written_is_what_was_there_when_the_save_began(tmp_path, monkeypatch):
    """The writer is held back until two more steps are taken: they change nothing of the checkpoint."""
    taken = threading.Event()
    real = saves.write_shard

    def write(file, tensors, metadata):
        assert metadata["step"] != "2" or taken.wait(60)
        return real(file, tensors, metadata)

    monkeypatch.setattr(saves, "write_shard", write)
    trainer = trainer_of(f"{LINE} --save {tmp_path}/a --save-interval 2 --async-save --exit-interval 3")
    step = trainer._step

    def counted(*args):
        if trainer.state.iteration == 2:
            assert published(tmp_path / "a") == [], "the second step is over and the checkpoint is not"
        stop = step(*args)
        if trainer.state.iteration == 3:
            taken.set()
        return stop

    monkeypatch.setattr(trainer, "_step", counted)
    trainer.train()
    trainer.close()
    monkeypatch.undo()
    run(f"--save {tmp_path}/b --exit-interval 2")
    for name, tensor in complete(tmp_path / "b")[2].tensors.items():
        assert complete(tmp_path / "a")[2].tensors[name] == tensor
    a, b = (complete(tmp_path / x)[2] for x in "ab")
    readers = [CheckpointFiles(tmp_path / x / "iter_0000002", m) for x, m in (("a", a), ("b", b))]
    for name in a.tensors:
        assert torch.equal(*(reader.read(name) for reader in readers)), name


def test_an_exception_does_not_wait_for_the_writer(tmp_path, monkeypatch):
    """Nor is anything of the unfinished checkpoint ever taken for one."""
    over, real = threading.Event(), saves.write_shard

    def write(*args):
        assert over.wait(60)
        return real(*args)

    monkeypatch.setattr(saves, "write_shard", write)
    trainer = trainer_of(f"{LINE} --save {tmp_path} --save-interval 2 --async-save")
    monkeypatch.setattr(trainer, "_time_is_up", lambda: 1 // (4 - trainer.state.iteration) < 0)
    monkeypatch.setattr(trainer.checkpoints, "settle", lambda wait: None)
    with pytest.raises(ZeroDivisionError):
        try:
            trainer.train()
        finally:
            trainer.close()
            assert not trainer.checkpoints._flight.ended() and published(tmp_path) == []
    over.set()
    trainer.checkpoints._flight.join(60)


def test_the_optimizer_waits_for_the_copy(tmp_path, monkeypatch):
    """The copy is held back until the next passes are over: the weights have not moved when it is made."""
    line = f"{LINE} --save {tmp_path}/a --save-interval 2 --async-save --exit-interval 3"
    trainer = trainer_of(line)
    passes, waits = threading.Event(), []
    real, waited = trainer.checkpoints._staging.copy, trainer.checkpoints.before_update

    def copy(tensors):
        if trainer.state.iteration == 2 and threading.current_thread().name == "checkpoint":
            assert passes.wait(60)
            time.sleep(0.3)
        return real(tensors)

    def before_update():
        passes.set()
        waits.append(trainer.checkpoints._flight is not None and not trainer.checkpoints._copied.is_set())
        waited()
        passes.clear()

    monkeypatch.setattr(trainer.checkpoints._staging, "copy", copy)
    monkeypatch.setattr(trainer.checkpoints, "before_update", before_update)
    trainer.train()
    trainer.close()
    assert waits == [False, False, True]
    run(f"--save {tmp_path}/b --exit-interval 2")
    a, b = (CheckpointFiles(tmp_path / x / "iter_0000002", complete(tmp_path / x)[2]) for x in "ab")
    for name in a.manifest.tensors:
        assert torch.equal(a.read(name), b.read(name)), name


# ------------------------------------------------------------------------------------------------ signals


@pytest.mark.slow
@pytest.mark.parametrize("background", mostly_thorough(["", "--async-save"], [1]))
def test_sigterm_saves(tmp_path, capsys, background):
    with_sigterm.calls = 0
    line = f"{LINE} --train-iters 100 --lr-decay-iters 100 --save {tmp_path} --save-interval 7 {background}"
    trainer = trainer_of(line, forward_step=with_sigterm)
    trainer.metrics.speaks = True
    trainer.train()
    trainer.close()
    said, last = capsys.readouterr().out, trainer.state.iteration
    assert last < 7 and f"saved checkpoint of iteration {last} " in said
    assert f"exiting program at iteration {last}: SIGTERM" in said
    assert published(tmp_path) == list(complete(tmp_path)) == [last]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == [".lock"]


def sigterm_twice(rank: int, world: int, line: str) -> None:
    """The second comes when the save of the first begins."""

    def write(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    with_sigterm.calls, saves.write_shard = 0, write
    trainer_of(line, world, forward_step=with_sigterm).train()


def unfinished(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".iter")]


@pytest.mark.parametrize("background", mostly_thorough(["", "--async-save"], [1]))
def test_a_second_sigterm_during_the_save_of_the_first_ends_at_once(ranks, tmp_path, background):
    """What was being saved is as if it had never begun: nobody reads it, and the next run clears it away."""
    line = f"{LINE} --train-iters 100 --lr-decay-iters 100 --save {tmp_path}"
    run(f"{line} --exit-interval 2")
    with pytest.raises(RankError, match="killed by SIGTERM"):
        ranks(1).run(sigterm_twice, f"{line} --load {tmp_path} {background}", timeout=30)
    assert published(tmp_path) == list(complete(tmp_path)) == [2]
    assert len(unfinished(tmp_path)) == 1
    assert run(f"{line} --load {tmp_path} --exit-interval 4").state.iteration == 4
    assert published(tmp_path) == [2, 4] and not unfinished(tmp_path)
