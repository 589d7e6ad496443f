"""The life of one rank: check in, work, leave together, or fail so that the others learn the cause.

The problem in a sentence: `init_process_group` and a script that ends are not enough; the fast rank leaves before the
slow one has connected, an exception on rank 1 becomes three others elsewhere, a killed launcher leaves ranks behind.

    rank, world = init(timeout_seconds=20)     # in a script that `torchrun` starts
    ...
    finish()

| step         | what happens                                                                                     |
|--------------|--------------------------------------------------------------------------------------------------|
| `init`       | meet through the store (the missing are named), compare what each was given (`launch.agreement`),|
|              | choose backend and GPU from what all ranks see (`launch.hardware`; loopback only on one machine),  |
|              | leave a note for the launcher, start the watch                                                   |
| `report(x)`  | a number or a list for the notebook that launched us                                             |
| `finish`     | meet again, so that none leaves early; destroy the group                                         |
| an exception | `launch.blame`: one traceback for the whole job, the exit status of its class                      |
| Ctrl-C       | 130, without a word                                                                              |

Environment: torchrun's (`RANK`, `WORLD_SIZE`, `MASTER_ADDR` ...) or srun's (`launch.launchers`), and the names below.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from minimegatron.comm import watchdog
from minimegatron.comm.async_ops import set_transport
from minimegatron.comm.shared_memory import SharedMemory
from minimegatron.errors import ConfigError
from minimegatron.launch import agreement, blame, hardware, launchers, procs
from minimegatron.launch.launchers import AGENT, RUN_DIR
from minimegatron.launch.ledger import Ledger
from minimegatron.launch.patience import Starting
from minimegatron.launch.stores import ledger_of, stores, who_is_waited_for
from minimegatron.launch.watch import Overdue, Watch


@dataclasses.dataclass
class _Here:
    """What `init` made. There is one per process: a process is one rank.

    The store is kept until the end: on rank 0 it may be the one that serves the others, and the process group, which
    holds it too, goes before the last meeting.
    """

    ledger: Ledger | None = None
    store: dist.Store | None = None
    watch: Watch | None = None
    seconds: float = 60.0
    choice: hardware.Choice | None = None


_here = _Here()


def init(
    timeout_seconds: float = 60.0, *, backend: str | None = None, facts: agreement.Facts | None = None
) -> tuple[int, int]:
    """Become a rank: join the process group that the launcher's environment describes.

    Started without a launcher, this is the only rank of a world of one. Where a group exists already (a warm rank of a
    notebook), nothing happens.

    Args:
        timeout_seconds: longest wait for another rank, here (one that visibly starts is waited for, see
            `launch.patience`) and in every collective of the default group.
        backend: "gloo" or "nccl"; default NCCL where there are GPUs, one for each rank, and gloo where there are none.
        facts: what this rank was given and every rank must have (see `launch.agreement`).

    Returns:
        (rank, world size).

    Raises:
        DeadlineError: some ranks did not come; names them.
        ConfigError: the environment is incomplete or of an unknown launcher (`launch/launchers`); the facts of the
            ranks differ; GPUs are there and cannot be used, or are too few (`launch/hardware`).
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    place = launchers.adopt()
    _end_with_the_launcher()
    _here.seconds = timeout_seconds
    sys.excepthook = _excepthook
    with who_is_waited_for(place, lambda: _here.ledger):
        _here.store, ledger = stores(place, timeout_seconds)
        _here.ledger = ledger
        looks = _meet(ledger, hardware.look(backend), timeout_seconds)
    if facts is not None:
        agreement.agree(ledger, facts, timeout_seconds)
    _here.choice = hardware.choose(backend, place.rank, looks)
    _set_up_device(_here.choice, place.world)
    _join_group(_here.choice.backend, _here.store, place, timeout_seconds)
    if place.world > 1:
        _warn_once(ledger)
        _here.watch = Watch(ledger, _siblings(ledger), blame.say, _overdue)
        _here.watch.start()
    if folder := os.environ.get(RUN_DIR):
        Path(folder, f"started.{place.rank}").write_text(_here.choice.backend)
    return place.rank, place.world


def finish() -> None:
    """Leave together: wait until every rank has come here, then destroy the process group.

    Raises:
        DeadlineError: some ranks did not come; names them.
    """
    ledger = _here.ledger
    if ledger is None:
        return
    ledger.meet("finish", _here.seconds)
    if _here.watch is not None:
        _here.watch.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
    # Where rank 0 itself serves the store (no agent), it has to leave last.
    if ledger.rank == 0:
        ledger.meet("left", _here.seconds)
    else:
        ledger.come("left")
    _here.ledger = _here.watch = _here.store = None


def described() -> str:
    """Backend, machines, ranks and this rank's GPU, as `init` has chosen them, in one line; "" before."""
    return _here.choice.said if _here.choice is not None else ""


def report(value: Any) -> None:
    """Hand a small result to the process that launched this rank (`Run.reports[rank]`); the last call counts.

    Args:
        value: numbers, strings, lists and dicts of them. Without a launcher that listens, nothing happens.

    Raises:
        ConfigError: not representable as JSON.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"cannot report {type(value).__name__}: {error}", fix="report x.tolist() or x.item()"
        ) from None
    if folder := os.environ.get(RUN_DIR):
        rank = int(os.environ.get("RANK", "0"))
        partial = Path(folder, f".report.{rank}")
        partial.write_text(text)
        partial.rename(Path(folder, f"report.{rank}.json"))


def run_rank(main: Callable[[], object]) -> NoReturn:
    """Run `main` as the whole life of this process and exit with the status of what happened (see `errors`).

    `main` may call `init` and `finish`; what it leaves open is finished here.
    """
    try:
        main()
        finish()
    except SystemExit as request:
        if request.code:
            raise
    except BaseException as error:
        _leave(_fail(error))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # Python itself joins its own at the exit
        procs.end_descendants(spare=[child.pid for child in multiprocessing.active_children() if child.pid])
    sys.exit(0)


# ---------------------------------------------------------------------------------------------------- beginning


def _end_with_the_launcher() -> None:
    """Die with torchrun, and take what this rank has started along."""
    faulthandler.enable()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        procs.die_with_parent(signal.SIGKILL, int(os.environ[AGENT]) if AGENT in os.environ else None)
        procs.adopt_orphans()  # plain torchrun ends nothing but its ranks: what a rank has started ends with the rank


def _meet(ledger: Ledger, look: hardware.Look, seconds: float) -> list[hardware.Look]:
    """Wait until every rank has come; what each of them sees."""
    ledger.store.set(f"pid/{ledger.rank}", json.dumps([*hardware.machine(), os.getpid()]))
    ledger.store.set(f"sees/{ledger.rank}", look.to_json())
    ledger.meet("start", seconds, Starting(lambda: _not_here_yet(ledger)).gained)
    seen = ledger.store.multi_get([f"sees/{r}" for r in range(ledger.world)])
    return [hardware.Look.from_json(text) for text in seen]


def _set_up_device(choice: hardware.Choice, world: int) -> None:
    """Threads, network interface and GPU of this process, before the group is made."""
    if choice.local_world > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if choice.local_world == world:
        _listen_on_loopback()
    if choice.gpu is None:
        procs.as_batch_job()
        procs.keep_memory()
    else:
        torch.cuda.set_device(choice.gpu)
        warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")  # it is this one


def _join_group(backend: str, store: dist.Store, place: launchers.Place, seconds: float) -> None:
    """Make the default process group.

    It gets no `device_id`, which would put all messages of a pipeline's group on one communicator (`comm/p2p`).
    """
    timeout = watchdog.group_timeout(seconds, backend)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)
    watchdog.watch(backend, seconds)
    if backend == "gloo":
        set_transport(SharedMemory())


def _warn_once(ledger: Ledger) -> None:
    """A warning that several ranks have is printed by the first of them (a notebook puts those of all together)."""
    show = warnings.showwarning
    if RUN_DIR in os.environ:
        return

    def show_once(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        mine, key = str(ledger.rank), hashlib.blake2b(f"{category} {message}".encode(), digest_size=8).hexdigest()
        with contextlib.suppress(dist.DistError):
            if _here.ledger is ledger and ledger.store.compare_set(f"warned/{key}", "", mine).decode() != mine:
                return
        show(message, category, *args, **kwargs)

    warnings.showwarning = show_once


def _listen_on_loopback() -> None:
    """All ranks are on this machine: no other has to reach them."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def _siblings(ledger: Ledger) -> dict[int, int]:
    """{rank: pid} of the other ranks on this machine."""
    homes = {r: json.loads(ledger.store.get(f"pid/{r}")) for r in range(ledger.world)}
    here = list(hardware.machine())
    return {r: pid for r, (*machine, pid) in homes.items() if machine == here and r != ledger.rank}


def _not_here_yet(ledger: Ledger) -> set[int]:
    """Processes of our launcher that have not come to the first meeting: ranks that are still importing."""
    come = [r for r in range(ledger.world) if ledger.store.check([f"met/start/{r}"])]
    homes = [json.loads(ledger.store.get(f"pid/{r}")) for r in come]
    here = list(hardware.machine())
    return set(procs.children(os.getppid())) - {pid for *machine, pid in homes if machine == here}


# -------------------------------------------------------------------------------------------------------- ending


def _excepthook(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
    _leave(_fail(error))


def _overdue(error: Overdue) -> NoReturn:
    """The main thread waits for a communication and cannot raise: `launch.watch` leaves for it."""
    _leave(_fail(error))


def _fail(error: BaseException) -> int:
    return blame.fail(error, _here.ledger or _ledger_of_a_launcher(), _here.watch, _here.seconds)


def _ledger_of_a_launcher() -> Ledger | None:
    """For an error before `init`: all ranks may have it, and one is enough to read."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        return ledger_of(launchers.place(), blame.CAUSE_SECONDS)
    except (dist.DistError, ConfigError):
        return None


def _leave(code: int) -> NoReturn:
    """Exit without unwinding: destructors of a broken process group may wait for the other side."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        procs.end_descendants()
    os._exit(code)
