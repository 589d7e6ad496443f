"""`torchrun --max-restarts`: ranks are killed, the job starts again and ends with the weights of one without faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from minimegatron.cli import main as minimegatron
from tests.checkpoint.runs import complete_steps
from tests.faults import helpers
from tests.thorough import mostly_thorough
from tests.training.test_trainer import TINY, trainer_of

TRAIN = (
    "--num-layers 2 --micro-batch-size 1 --global-batch-size 4 --train-iters 12 --lr-decay-iters 12 --seed 7 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --use-distributed-optimizer --save-interval 2"
)
VICTIM = Path(__file__).with_name("train_victim.py")


def job(folder: Path, kills: str, restarts: int, *options: str, root: str) -> tuple[int, str]:
    folder.mkdir(exist_ok=True)
    command = ["-m", "labkit.ranks.agent", "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    args = f"{TINY} --mock-data {TRAIN} --save {folder}/{root} --load {folder}/{root}".split() + list(options)
    with helpers.background(folder, *command, str(VICTIM), str(folder), kills, *args) as (agent, token):
        status = agent.wait(280)
        helpers.everything_gone(token)
    return status, (folder / "output").read_text()


def uninterrupted(rank: int, world: int, line: str) -> None:
    trainer = trainer_of(line, world)
    trainer.train()
    trainer.close()


@pytest.mark.parametrize(
    ("kills", "options"),
    mostly_thorough([("5", ""), ("0,3,4,7,11", ""), ("3,8", "--async-save"), ("6,7", "--bf16")], [0]),
)
def test_the_weights_are_those_of_a_run_without_faults(ranks, tmp_path, capsys, kills, options):
    status, said = job(tmp_path / "faults", kills, 5, *options.split(), root="a")
    assert status == 0, said
    assert len(list((tmp_path / "faults").glob("died.*"))) == len(kills.split(","))
    ranks(2).run(uninterrupted, f"{TRAIN} {options} --save {tmp_path}/plain/a")
    assert complete_steps(tmp_path / "faults/a") == complete_steps(tmp_path / "plain/a") == [2, 4, 6, 8, 10, 12]
    capsys.readouterr()
    assert minimegatron(["checkpoint", "diff", f"{tmp_path}/faults/a", f"{tmp_path}/plain/a"]) == 0
    assert "to the bit" in capsys.readouterr().out


@pytest.mark.thorough
def test_after_the_last_restart_the_job_ends_with_status_5(tmp_path):
    status, said = job(tmp_path / "faults", "3,5,7", 1, root="a")
    assert status == 5 and "was killed by SIGKILL" in said
    assert complete_steps(tmp_path / "faults/a") == [2, 4]
