"""Where the ranks of a job meet: a rank's number from its launcher's environment, and the store that all of them use.

The problem in a sentence: a process that was started sixteen times over must know its number, how many there are, and
where to meet, and every launcher writes that into other variables.

| started by                   | read                                    | ranks meet at                               |
|------------------------------|-----------------------------------------|---------------------------------------------|
| torchrun, or by hand         | `RANK`, `WORLD_SIZE`                    | `MASTER_ADDR`, `MASTER_PORT`                |
| srun (a step of a SLURM job) | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`  | the step's first node, a port by job number |
| no launcher                  |                                         | itself: a world of one                      |
| mpirun, mpiexec, jsrun       | refused: they do not say where to meet  |                                             |

`RANK` comes first, so torchrun inside of a SLURM job is torchrun. The batch script of a SLURM job has most of srun's
variables as well, but is no step (`SLURM_STEP_ID`) and hence one process. How many ranks a machine has, and which of
them this one is, `launch/hardware` counts once all have met.

The store is a key-value server. torchrun's agent serves it, before any rank starts; without an agent (srun, variables
set by hand) rank 0 does, and the others look for it until the deadline. The usual reason for finding nobody are two
variables that were left in a shell, so the error says that.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
import threading
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

import torch.distributed as dist

from minimegatron.errors import ConfigError, DeadlineError
from minimegatron.launch import procs
from minimegatron.launch.ledger import Ledger
from minimegatron.launch.startup_deadline import StartupDeadline, StartupProgress

MPI = {"OMPI_COMM_WORLD_SIZE": "mpirun (Open MPI)", "JSM_NAMESPACE_SIZE": "jsrun"}
PMI = {"PMI_SIZE": "mpiexec", "MV2_COMM_WORLD_SIZE": "mpirun (MVAPICH)"}
TORCHRUN = "start with `torchrun --nproc-per-node=N ...`, with srun, or set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
FIRST_PORT, PORTS = 20000, 10000
LOOK_SECONDS = 0.2
UNSET = "where no launcher has set RANK and WORLD_SIZE: `unset RANK WORLD_SIZE`"


class Place(NamedTuple):
    """A rank's number, the number of ranks, and the launcher: "torchrun" (or another that sets its variables), "srun",
    or "" for none."""

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
    """`place`, after adding torchrun's variables for programs that read them, if srun has set its own."""
    own = place(environ)
    if own.launcher == "srun":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
        job = int(environ.get("SLURM_JOB_ID", "0")) + 97 * int(environ["SLURM_STEP_ID"])
        environ.setdefault("MASTER_ADDR", first_host(nodes))
        environ.setdefault("MASTER_PORT", str(FIRST_PORT + job % PORTS))
        environ.update(RANK=str(own.rank), WORLD_SIZE=str(own.world))
        with contextlib.suppress(KeyError):  # for others that read them; `launch/hardware` counts for itself
            node, per_node = int(environ["SLURM_NODEID"]), tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
            environ.update(LOCAL_RANK=environ["SLURM_LOCALID"], LOCAL_WORLD_SIZE=str(per_node[node]))
    return own


def first_host(nodes: str) -> str:
    """The first of a list of nodes as SLURM writes it: `gpu[03-05,9]-ib,login1` begins with `gpu03-ib`."""
    end = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if end is None:
        raise ConfigError(f"SLURM's list of nodes is {nodes!r}", fix="set MASTER_ADDR to the host of rank 0")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", end[0])


def tasks_per_node(text: str) -> list[int]:
    """Ranks on each node, as SLURM counts them: `4(x2),3` is [4, 4, 3]."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()) for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}", fix="set LOCAL_WORLD_SIZE, RANK and WORLD_SIZE")
    return [count for part in parts if part for count in [int(part[1])] * int(part[2] or 1)]


def _by_variables(environ: Mapping[str, str]) -> Place:
    """The place by torchrun's variables; without a rendezvous address those of a world of one count as none."""
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


# ------------------------------------------------------------------------------------------------------ the store


def stores(place: Place, seconds: float) -> tuple[dist.Store, Ledger]:
    """The store for the process group, and a ledger on a connection of its own.

    Raises:
        ConfigError: rank 0 cannot serve at MASTER_ADDR and MASTER_PORT.
        DeadlineError: no server answers there.
    """
    if not place.launcher:
        return dist.HashStore(), Ledger(dist.HashStore(), place.rank, place.world)
    timeout = datetime.timedelta(seconds=seconds)
    if _agent_serves():
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    else:
        if place.rank != 0:
            _wait_for_server(place, seconds)
        store = _own_store(place, timeout)
    return dist.PrefixStore(f"default/{_attempt()}", store), ledger_of(place, seconds)


def ledger_of(place: Place, seconds: float) -> Ledger:
    """The ledger of a job whose store has a server."""
    host, port = address()
    timeout = datetime.timedelta(seconds=seconds)
    client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return Ledger(dist.PrefixStore(f"minimegatron/{_attempt()}", client), place.rank, place.world)


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _attempt() -> str:
    """A prefix of keys for this attempt: an agent's store outlives its ranks, and still has addresses of dead ranks.

    A store of rank 0's own does not, and there the launcher of a host that has come later counts fewer attempts.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _agent_serves() else "0"


def address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _own_store(place: Place, timeout: datetime.timedelta) -> dist.Store:
    """A connection to the server, which is rank 0's."""
    host, port = address()
    try:
        return dist.TCPStore(host, port, is_master=place.rank == 0, wait_for_workers=False, timeout=timeout)
    except dist.DistNetworkError as error:
        raise ConfigError(
            f"rank {place.rank} cannot meet others at {host}:{port}: {str(error).splitlines()[0][:200]}",
            fix=f"another MASTER_ADDR or MASTER_PORT; {UNSET}",
        ) from None


def _wait_for_server(place: Place, seconds: float) -> None:
    """Return when a server listens at the address of rank 0."""
    host, port = address()
    deadline = StartupDeadline(seconds, StartupProgress(lambda: {*procs.children(os.getppid())} - {os.getpid()}).made)
    while True:
        try:
            socket.create_connection((host, port), timeout=max(LOOK_SECONDS, min(seconds, 5.0))).close()
            return
        except OSError as error:
            if deadline.is_over():
                raise DeadlineError(
                    f"start: rank 0 did not come within {seconds:g} s: nobody listens at {host}:{port} ({error})",
                    where=f"rank {place.rank} of {place.world}",
                    fix=f"look at the log of rank 0, at MASTER_ADDR and MASTER_PORT; {UNSET}",
                ) from None
        threading.Event().wait(LOOK_SECONDS)
