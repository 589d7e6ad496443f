"""Where the ranks of a job meet: a key-value server that one of them, or the launcher, serves.

The problem in a sentence: a rank that finds nobody there learns it from C++ after a minute, with a stack of forty
lines, and the usual reason is two variables that were left in a shell.

| who set `RANK`, `WORLD_SIZE` ...     | the server is            | a rank that finds none                           |
|--------------------------------------|--------------------------|--------------------------------------------------|
| torchrun                             | its agent's              | cannot be: the agent is there before its ranks   |
| torchrun without an agent's store,   | rank 0's, at MASTER_ADDR | looks for it until the deadline, and says so     |
| srun, somebody by hand               | and MASTER_PORT          |                                                  |
| nobody                               | this process's own       |                                                  |

Where no launcher has started the ranks, one that waits says after 3 s for whom, where and why.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
from collections.abc import Callable, Iterator

import torch.distributed as dist

from minimegatron.errors import ConfigError, DeadlineError, named
from minimegatron.launch import blame, procs
from minimegatron.launch.launchers import Place
from minimegatron.launch.ledger import Ledger
from minimegatron.launch.patience import Patience, Starting

SOON_SECONDS = 3.0  # until a rank that no launcher has started says whom it waits for
LOOK_SECONDS = 0.2
UNSET = "where no launcher has set RANK and WORLD_SIZE: `unset RANK WORLD_SIZE`"


def stores(place: Place, seconds: float) -> tuple[dist.Store, Ledger]:
    """The store for the process group, and a ledger on a connection of its own.

    Raises:
        ConfigError: rank 0 cannot serve at MASTER_ADDR and MASTER_PORT.
        DeadlineError: nobody serves there.
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
    """The ledger of a job that has a server."""
    host, port = _address()
    timeout = datetime.timedelta(seconds=seconds)
    client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return Ledger(dist.PrefixStore(f"minimegatron/{_attempt()}", client), place.rank, place.world)


@contextlib.contextmanager
def who_is_waited_for(place: Place, ledger: Callable[[], Ledger | None]) -> Iterator[None]:
    """In the block ranks meet: where no launcher has started them, say soon who is waited for.

    Args:
        place: of this rank.
        ledger: of this rank, as soon as it has one.
    """
    if place.launcher != "torchrun" or place.world == 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        yield
        return

    def say() -> None:
        others, found = [r for r in range(place.world) if r != place.rank], ledger()
        with contextlib.suppress(dist.DistError):
            if found is not None:
                others = [r for r in others if not found.store.check([f"met/start/{r}"])]
        host, port = _address()
        blame.say(
            f"rank {place.rank} of {place.world} waits for {named(others)} at {host}:{port}, because RANK and "
            "WORLD_SIZE are set; `unset RANK WORLD_SIZE` runs alone"
        )

    timer = threading.Timer(SOON_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _attempt() -> str:
    """Whose keys these are. An agent's store outlives its ranks, and addresses of dead ranks are still in it.

    A store of rank 0's own does not, and there the launcher of a host that has come later counts fewer attempts.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _agent_serves() else "0"


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _own_store(place: Place, timeout: datetime.timedelta) -> dist.Store:
    """A connection to the server, which is rank 0's."""
    host, port = _address()
    try:
        return dist.TCPStore(host, port, is_master=place.rank == 0, wait_for_workers=False, timeout=timeout)
    except dist.DistNetworkError as error:
        raise ConfigError(
            f"rank {place.rank} cannot meet others at {host}:{port}: {str(error).splitlines()[0][:200]}",
            fix=f"another MASTER_ADDR or MASTER_PORT; {UNSET}",
        ) from None


def _wait_for_server(place: Place, seconds: float) -> None:
    """Return when somebody listens at the address of rank 0."""
    host, port = _address()
    patience = Patience(seconds, Starting(lambda: {*procs.children(os.getppid())} - {os.getpid()}).gained)
    while True:
        try:
            socket.create_connection((host, port), timeout=max(LOOK_SECONDS, min(seconds, 5.0))).close()
            return
        except OSError as error:
            if patience.is_over():
                raise DeadlineError(
                    f"start: rank 0 did not come within {seconds:g} s: nobody listens at {host}:{port} ({error})",
                    where=f"rank {place.rank} of {place.world}",
                    fix=f"look at the log of rank 0, at MASTER_ADDR and MASTER_PORT; {UNSET}",
                ) from None
        threading.Event().wait(LOOK_SECONDS)
