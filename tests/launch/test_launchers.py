"""Which rank a process is, by the environment of each launcher."""

from __future__ import annotations

import pytest

from minimegatron.errors import ConfigError
from minimegatron.launch.launchers import Place, adopt, first_host, place, tasks_per_node

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
