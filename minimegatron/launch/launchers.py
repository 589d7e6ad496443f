"""Which rank this process is, from the environment that its launcher has set.

The problem in a sentence: a process that was started sixteen times over must know its number, how many there are, and
where to meet, and every launcher writes that into other variables.

| started by                   | read                                    | ranks meet at                               |
|------------------------------|-----------------------------------------|---------------------------------------------|
| torchrun, or by hand         | `RANK`, `WORLD_SIZE`                    | `MASTER_ADDR`, `MASTER_PORT`                |
| srun (a step of a SLURM job) | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`  | the step's first node, a port by job number |
| no launcher                  |                                         | itself: a world of one                      |
| mpirun, mpiexec, jsrun       | refused: it says nowhere where to meet  |                                             |

How many ranks a machine has, and which of them this one is, is counted once all have met (`launch/hardware`), so no
launcher has to say it. What srun says of it ("4(x2),3" ranks on three nodes) is put into torchrun's variables for
programs that read those.

`RANK` comes first, so torchrun inside of a SLURM job is torchrun. The batch script of a SLURM job has most of srun's
variables as well, but is no step (`SLURM_STEP_ID`) and hence one process.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from minimegatron.errors import ConfigError

MPI = {"OMPI_COMM_WORLD_SIZE": "mpirun (Open MPI)", "JSM_NAMESPACE_SIZE": "jsrun"}
PMI = {"PMI_SIZE": "mpiexec", "MV2_COMM_WORLD_SIZE": "mpirun (MVAPICH)"}
TORCHRUN = "start with `torchrun --nproc-per-node=N ...`, with srun, or set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
FIRST_PORT, PORTS = 20000, 10000
# Set by `labkit/ranks`: where ranks check in and report; the pid of an agent that reports how its ranks ended.
RUN_DIR, AGENT = "MINIMEGATRON_RUN_DIR", "MINIMEGATRON_AGENT"


class Place(NamedTuple):
    """A rank among all, and the launcher: "torchrun" (or another that sets its variables), "srun", or "" for none."""

    rank: int
    world: int
    launcher: str


def place(environ: Mapping[str, str] = os.environ) -> Place:
    """This process's place.

    Raises:
        ConfigError: the environment contradicts itself, or is of a launcher that is not supported.
    """
    if "RANK" in environ:
        return _by_variables(environ)
    _refuse(environ, MPI)
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return _step(environ)
    _refuse(environ, PMI)
    return Place(0, 1, "")


def adopt(environ: MutableMapping[str, str] = os.environ) -> Place:
    """`place`; where srun has set its own variables, torchrun's are added for programs that read those."""
    found = place(environ)
    if found.launcher == "srun":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
        job = int(environ.get("SLURM_JOB_ID", "0")) + 97 * int(environ["SLURM_STEP_ID"])
        environ.setdefault("MASTER_ADDR", first_host(nodes))
        environ.setdefault("MASTER_PORT", str(FIRST_PORT + job % PORTS))
        environ.update(RANK=str(found.rank), WORLD_SIZE=str(found.world))
        with contextlib.suppress(KeyError):  # for others that read them; `launch/hardware` counts for itself
            node, per_node = int(environ["SLURM_NODEID"]), tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
            environ.update(LOCAL_RANK=environ["SLURM_LOCALID"], LOCAL_WORLD_SIZE=str(per_node[node]))
    return found


def first_host(nodes: str) -> str:
    """The first of a list of nodes as SLURM writes it: `gpu[03-05,9]-ib,login1` begins with `gpu03-ib`."""
    end = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if end is None:
        raise ConfigError(f"SLURM's list of nodes is {nodes!r}", fix="set MASTER_ADDR to the host of rank 0")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", end[0])


def tasks_per_node(text: str) -> list[int]:
    """Ranks on each node, as SLURM counts them: `4(x2),3` is [4, 4, 3]."""
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()) for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}", fix="set LOCAL_WORLD_SIZE, RANK and WORLD_SIZE")
    return [count for part in found if part for count in [int(part[1])] * int(part[2] or 1)]


def _by_variables(environ: Mapping[str, str]) -> Place:
    """By torchrun's variables; those of a world of one, without a place to meet, are as good as none."""
    try:
        rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        if not 0 <= rank < world:
            raise ValueError(f"RANK {rank} of WORLD_SIZE {world}")
        if "MASTER_ADDR" not in environ and world == 1:
            return Place(0, 1, "")
        int(environ["MASTER_PORT"])
        _ = environ["MASTER_ADDR"]
        return Place(rank, world, "torchrun")
    except (KeyError, ValueError) as error:
        missing = f"{error.args[0]} is not set" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"RANK is set, but the rest of a launcher's environment is not usable: {missing}",
            fix="start with `torchrun --standalone --nproc-per-node=N script.py`, or unset RANK and WORLD_SIZE",
        ) from None


def _step(environ: Mapping[str, str]) -> Place:
    try:
        world = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
        if world == 1:
            return Place(0, 1, "")
        return Place(int(environ["SLURM_PROCID"]), world, "srun")
    except (KeyError, ValueError) as error:
        raise ConfigError(f"srun's environment is not usable: {error}", fix=TORCHRUN) from None


def _refuse(environ: Mapping[str, str], launchers: Mapping[str, str]) -> None:
    for name, launcher in launchers.items():
        if environ.get(name, "1") != "1":
            raise ConfigError(
                f"started by {launcher} ({name}={environ[name]}), which says nowhere where the ranks meet", fix=TORCHRUN
            )
