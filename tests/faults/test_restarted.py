"""`torchrun --max-restarts`: ranks are killed or a host is lost, and the job ends with the weights of a run without."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit.ranks.agent import FORK
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
    command = ["-m", "labkit.ranks.agent", FORK, "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
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


# ------------------------------------------------------------------------------------------------------- two hosts
#
# A host is a network namespace with an address and a name of its own, and a cable to the other. Losing it is pulling
# the cable, so that nothing that it sends arrives, and then killing all that runs there: the host that stays learns of
# it by a deadline.

PORT = 29500
# The network between them; and ranks meet at a store of rank 0's: an agent that shares its own tells where it is once,
# so that one that comes later waits for it in vain (torch 2.13).
ENVIRONMENT = ("env", "GLOO_SOCKET_IFNAME=cable", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
# Rank 1 freezes at the sixth step of the first attempt.
FREEZES = """
import pathlib, sys, time
from minimegatron.commands.pretrain_gpt import pretrain
from minimegatron.launch.rank import run_rank
from minimegatron.training.trainer import Trainer
from tests.mock_data import few_documents

frozen, real = pathlib.Path(sys.argv[1]), Trainer._step

def step(trainer, asks_to_stop):
    if trainer.mesh.rank == 1 and trainer.state.iteration == 5 and not frozen.exists():
        frozen.touch()
        time.sleep(600)
    return real(trainer, asks_to_stop)

def main():
    with few_documents():
        pretrain(sys.argv[2:])

Trainer._step = step
run_rank(main)
"""


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Host:
    """One of the two.

    Args:
        folder: for what its launcher writes.
        number: of its address.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.name, self.address = f"mini-{os.getpid()}-{number}", f"10.77.0.{number}"
        self.folder = folder / self.name
        self.folder.mkdir()

    def cable(self, state: str) -> None:
        ip("-n", self.name, "link", "set", "cable", state)

    def command(self, *words: str) -> list[str]:
        """Words that run a program there."""
        named = 'hostname "$1" && shift && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named, "sh", self.name, *words]

    def kill(self) -> None:
        """All that runs there."""
        for pid in ip("netns", "pids", self.name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)

    def output(self) -> str:
        return (self.folder / "output").read_text()


@pytest.fixture
def hosts(tmp_path) -> Iterator[list[Host]]:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("this machine has no `ip` or no `unshare`")
    both = [Host(tmp_path, number) for number in (1, 2)]
    made = []
    try:
        try:
            for host in both:
                ip("netns", "add", host.name)
                made.append(host)
                ip("-n", host.name, "link", "set", "lo", "up")
            cable = ["type", "veth", "peer", "name", "cable", "netns", both[1].name]
            ip("link", "add", "cable", "netns", both[0].name, *cable)
            for host in both:
                ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "cable")
                host.cable("up")
            subprocess.run(both[0].command("true"), check=True, capture_output=True, timeout=20)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield both
    finally:
        for host in made:
            host.kill()
            ip("netns", "delete", host.name)


def torchrun(host: Host, head: Host, script: Path, *args: str) -> Any:
    """On a host, with one rank."""
    agent = ["-m", "labkit.ranks.agent", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
    agent += ["--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint={head.address}:{PORT}"]
    agent += [f"--rdzv-conf=is_host={host is head}", f"--local-addr={host.address}", str(script), *args]
    return helpers.background(host.folder, *agent, prefix=host.command(*ENVIRONMENT))


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_job_that_loses_a_host_ends_with_the_weights_of_one_that_did_not(ranks, hosts, tmp_path, capsys):
    first, second = hosts
    script, root, frozen = tmp_path / "victim.py", tmp_path / "faults" / "a", tmp_path / "frozen"
    script.write_text(FREEZES)
    train = f"{TINY} --mock-data {TRAIN} --save {root} --load {root} --distributed-timeout-minutes 0.3"
    args = (script, str(frozen), *train.split())
    with torchrun(first, first, *args) as (agent, token), contextlib.ExitStack() as stack:
        stack.enter_context(torchrun(second, first, *args))
        helpers.wait_for(frozen.exists, 120, "the sixth step")
        second.cable("down")
        second.kill()
        helpers.wait_for(lambda: "rank 1" in first.output(), 60, "the rank that stays names the one that is lost")
        second.cable("up")
        again, _ = stack.enter_context(torchrun(second, first, *args))
        statuses = agent.wait(180), again.wait(60)
        assert statuses == (0, 0), first.output() + second.output()
        helpers.everything_gone(token)
    assert "loaded checkpoint of iteration 4" in first.output()
    ranks(2).run(uninterrupted, f"{TRAIN} --save {tmp_path}/plain/a")
    assert complete_steps(root) == complete_steps(tmp_path / "plain/a") == [2, 4, 6, 8, 10, 12]
    capsys.readouterr()
    assert minimegatron(["checkpoint", "diff", str(root), f"{tmp_path}/plain/a"]) == 0
    assert "to the bit" in capsys.readouterr().out
