"""Which rank a process is by the environment of each launcher, where ranks meet, and the batch script for SLURM."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.run import get_args_parser

from minimegatron.errors import ConfigError, DeadlineError
from minimegatron.launch.rendezvous import Place, adopt, first_host, place, stores, tasks_per_node
from minimegatron.training.arguments import parse_args

STEP = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_NTASKS": "11", "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "11", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_NODELIST": "gpu[01-04],big7", "SLURM_STEP_NODELIST": "gpu[02-03],big7",
}  # fmt: skip


def test_a_step_of_slurm_has_torchruns_variables_after_it():
    environ = dict(STEP)
    assert adopt(environ) == Place(9, 11, "srun")
    assert {k: environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")} == {
        "RANK": "9", "WORLD_SIZE": "11", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "gpu02",
    }  # fmt: skip
    assert adopt(environ) == Place(9, 11, "torchrun"), "they stand"
    ports = {adopt(e := {**STEP, "SLURM_PROCID": str(r)}) and e["MASTER_PORT"] for r in range(3)}
    assert len(ports) == 1 and 1024 < int(ports.pop()) < 32768
    kept = {**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    adopt(kept)
    assert (kept["MASTER_ADDR"], kept["MASTER_PORT"]) == ("10.0.0.1", "1234")


MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_torchrun_in_a_job_of_slurm_is_torchrun():
    assert place({**STEP, **MEET, "RANK": "1", "WORLD_SIZE": "2"}) == Place(1, 2, "torchrun")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {k: v for k, v in STEP.items() if k != "SLURM_STEP_ID"},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_nobody_a_batch_script_and_a_step_of_one_are_worlds_of_one(environ):
    assert place(environ) == Place(0, 1, "")
    adopt(before := dict(environ))
    assert before == environ


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, r"started by mpirun \(Open MPI\) \(OMPI_COMM_WORLD_SIZE=4\)"),
        ({**STEP, "OMPI_COMM_WORLD_SIZE": "4"}, "mpirun"),
        ({"PMI_SIZE": "2"}, "mpiexec"),
        ({"RANK": "0"}, "RANK is set, but the rest"),
        ({"RANK": "0", "WORLD_SIZE": "many"}, "RANK is set, but the rest"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is not set"),
        ({**MEET, "RANK": "2", "WORLD_SIZE": "2"}, "RANK 2 of WORLD_SIZE 2"),
        ({**STEP, "SLURM_PROCID": "x"}, "srun's environment is not usable"),
    ],
)
def test_what_is_not_understood_is_refused(environ, said):
    with pytest.raises(ConfigError, match=said):
        place(environ)


def test_one_process_of_mpirun_is_one_process():
    assert place({"OMPI_COMM_WORLD_SIZE": "1"}) == Place(0, 1, "")
    assert place({**STEP, "PMI_SIZE": "11"}).launcher == "srun"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"), ("gpu[1-4]", "gpu1"),
        ("gpu[03,07-09],x", "gpu03"), ("a,b", "a"), ("n[05-06]-ib[1,2],z", "n05-ib1"),
        ("r1-n[12]", "r1-n12"),
    ],
)  # fmt: skip
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


def test_tasks_per_node():
    assert tasks_per_node("4(x2),3") == [4, 4, 3]
    assert tasks_per_node("8") == [8]
    for wrong in ("4(y2)", "", "four"):
        with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE"):
            tasks_per_node(wrong)
    with pytest.raises(ConfigError, match="list of nodes"):
        first_host("")


# ---------------------------------------------------------------------------------------------------- the store


def test_a_restarted_rank_does_not_see_the_addresses_of_dead_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agent keeps one store for all attempts, so gloo's keys must say which attempt they are of."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**given, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    found = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store, ledger = stores(Place(0, 1, "torchrun"), 20)
        for one in (store, ledger.store):
            found.append(one.check(["address"]))
            one.set("address", attempt)
    assert found == [False] * 4


def test_where_rank_zero_does_not_serve_the_error_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(ConfigError, match=f"rank 0 cannot meet others at 127.0.0.1:{port}: .*in use"):
            stores(Place(0, 2, "torchrun"), 5)
    with pytest.raises(DeadlineError, match=f"rank 0 did not come within 0.1 s: nobody listens at 127.0.0.1:{port}"):
        stores(Place(1, 3, "torchrun"), 0.1)


# ------------------------------------------------------------------------------------ examples/pretrain.sbatch

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain.sbatch"


def handed_to_srun(folder: Path) -> list[str]:
    """The words that srun gets in a job on two nodes."""
    commands = {"srun": 'printf "%s\\n" "$@" > "$SAID"', "scontrol": 'printf "node-%s\\n" 1 2'}
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    activate = folder / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    slurm = {"JOB_NODELIST": "node-[1-2]", "JOB_NUM_NODES": "2", "JOB_ID": "123456", "JOB_NAME": "minimegatron"}
    env = {f"SLURM_{name}": value for name, value in {**slurm, "CPUS_PER_TASK": "64"}.items()}
    env |= {"PATH": f"{folder}:{os.environ['PATH']}", "SAID": str(folder / "said")}
    subprocess.run(["bash", SCRIPT], check=True, cwd=folder, env=env, timeout=60)
    return (folder / "said").read_text().splitlines()


def test_it_is_shell():
    done = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


def test_what_srun_gets_are_flags_that_fit_together(tmp_path):
    said = handed_to_srun(tmp_path)
    assert said[:2] == ["--kill-on-bad-exit=1", "torchrun"]
    args = get_args_parser().parse_args(said[2:])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_endpoint) == ("2", "8", "node-1:23456")
    assert args.module and [args.training_script, args.training_script_args[0]] == ["minimegatron", "train"]
    run = parse_args(args.training_script_args[1:], world_size=16)
    assert run.checkpoint.save == run.checkpoint.load == "runs/minimegatron" and run.checkpoint.async_save
    assert run.parallel.tensor_model_parallel_size == 8 and run.training.global_batch_size == 512


def test_ranks_have_less_time_to_save_than_the_scheduler_gives():
    text = SCRIPT.read_text()
    given, taken = re.search(r"--signal=TERM@(\d+)", text), re.search(r"--shutdown-timeout (\d+)", text)
    assert given and taken and 60 <= int(taken[1]) < int(given[1])
