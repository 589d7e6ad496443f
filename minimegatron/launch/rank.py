"""The life of one rank: join the group, work, leave together, or fail so that all ranks learn the cause.

The problem in a sentence: `init_process_group` and a script that ends are not enough; the fast rank leaves before the
slow one has connected, an exception on rank 1 becomes three others elsewhere, a killed launcher leaves ranks behind.

    rank, world = init(timeout_seconds=20)     # in a script that `torchrun` starts
    ...
    finish()

| step         | what happens                                                                                       |
|--------------|----------------------------------------------------------------------------------------------------|
| `init`       | ranks meet through the store (the missing are named), compare what each was given                  |
|              | (`launch/agreement`), choose backend and GPU from what all of them see (`launch/hardware`), join   |
|              | the process group (on loopback where they share a machine), and start the watch (`launch/watch`)   |
| `report(x)`  | hands a number or a list to the notebook that launched the rank                                    |
| `finish`     | ranks meet again, so that none leaves early; then they destroy the group                           |
| an exception | `launch/error_report`: one traceback for the whole job, the exit status of its class               |
| Ctrl-C       | exit status 130, no output                                                                         |

Environment: torchrun's (`RANK`, `WORLD_SIZE`, `MASTER_ADDR` ...) or srun's, see `launch/rendezvous`.
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
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from minimegatron.comm import pipes, watchdog
from minimegatron.comm.async_ops import set_transport
from minimegatron.comm.gloo import GlooTransport
from minimegatron.errors import ConfigError, named
from minimegatron.launch import agreement, clocks, error_report, flight_records, hardware, procs, rendezvous
from minimegatron.launch.ledger import Ledger
from minimegatron.launch.procs import AGENT, RUN_DIR
from minimegatron.launch.rendezvous import Place, ledger_of, stores
from minimegatron.launch.startup_deadline import StartupProgress
from minimegatron.launch.watch import Overdue, Watch


@dataclasses.dataclass
class _Rank:
    """The state that `init` made; one for each process.

    The store is kept until the end: on rank 0 it may serve the others, and the process group, which also holds it, is
    destroyed before the last meeting.
    """

    ledger: Ledger | None = None
    store: dist.Store | None = None
    watch: Watch | None = None
    seconds: float = 60.0
    choice: hardware.Choice | None = None
    clock_offset_ns: int = 0


_rank = _Rank()
SOON_SECONDS = 3.0  # until a rank that no launcher has started says whom it waits for


def init(
    timeout_seconds: float = 60.0, *, backend: str | None = None, facts: agreement.Facts | None = None
) -> tuple[int, int]:
    """Join the process group that the launcher's environment describes.

    Started without a launcher, this is the only rank of a world of one. If a group exists already (a warm rank of a
    notebook), nothing happens.

    Args:
        timeout_seconds: longest wait for another rank, here (a rank that makes progress while starting is waited for,
            see `launch/startup_deadline`) and in every collective of the default group.
        backend: "gloo" or "nccl"; default NCCL if there are GPUs, one for each rank, and gloo if there are none.
        facts: facts that must be equal on every rank (see `launch/agreement`).

    Returns:
        (rank, world size).

    Raises:
        DeadlineError: some ranks did not come; names them.
        ConfigError: the environment is incomplete or of an unknown launcher (`launch/rendezvous`); the facts of the
            ranks differ; GPUs are there and cannot be used, or are too few (`launch/hardware`).
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    place = rendezvous.adopt()
    _end_with_the_launcher()
    _rank.seconds = timeout_seconds
    sys.excepthook = _excepthook
    with _tell_who_is_missing(place):
        _rank.store, ledger = stores(place, timeout_seconds)
        _rank.ledger = ledger
        looks = _meet(ledger, hardware.look(backend), timeout_seconds)
    if facts is not None:
        agreement.agree(ledger, facts, timeout_seconds)
    _rank.choice = hardware.choose(backend, place.rank, looks)
    _set_up_device(_rank.choice, place.world)
    _join_group(_rank.choice.backend, _rank.store, place, timeout_seconds)
    if place.world > 1:
        _rank.clock_offset_ns = clocks.offset(ledger, [look.machine for look in looks])
        siblings = _siblings(ledger)
        flight_records.start(ledger, timeout_seconds, _rank.clock_offset_ns, siblings)
        _warn_once(ledger)
        _rank.watch = Watch(ledger, siblings, error_report.say, _overdue)
        _rank.watch.start()
    if folder := os.environ.get(RUN_DIR):
        Path(folder, f"started.{place.rank}").write_text(_rank.choice.backend)
    return place.rank, place.world


def finish() -> None:
    """Wait until every rank has called it, then destroy the process group.

    Raises:
        DeadlineError: some ranks did not come; names them.
    """
    ledger = _rank.ledger
    if ledger is None:
        return
    ledger.meet("finish", _rank.seconds)
    if _rank.watch is not None:
        _rank.watch.stop()
    pipes.close_all()
    flight_records.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
    # Where rank 0 itself serves the store (no agent), it has to leave last.
    if ledger.rank == 0:
        ledger.meet("left", _rank.seconds)
    else:
        ledger.come("left")
    _rank.ledger = _rank.watch = _rank.store = None


def clock_offset_ns() -> int:
    """Nanoseconds to add to this machine's clock so that it shows the time of rank 0's (`launch/clocks`)."""
    return _rank.clock_offset_ns


def described() -> str:
    """Backend, machines, ranks and this rank's GPU in one line; "" before `init`."""
    return _rank.choice.description if _rank.choice is not None else ""


def report(value: Any) -> None:
    """Send a small result to the process that launched this rank (`Run.reports[rank]`); the last call counts.

    Args:
        value: numbers, strings, lists and dicts of them. Without a launcher that listens, nothing happens.

    Raises:
        ConfigError: the value cannot be written as JSON.
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
    """Run `main` as the whole life of this process and exit with the status of its outcome (see `errors`).

    `main` may call `init` and `finish`; a group that it leaves open is finished here.
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
    """End when torchrun ends, together with all descendants."""
    faulthandler.enable()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        procs.die_with_parent(signal.SIGKILL, int(os.environ[AGENT]) if AGENT in os.environ else None)
        procs.adopt_orphans()  # plain torchrun ends nothing but its ranks: what a rank has started ends with the rank


@contextlib.contextmanager
def _tell_who_is_missing(place: Place) -> Iterator[None]:
    """In the block ranks meet: without a launcher's agent, print after `SOON_SECONDS` which ranks are missing."""
    if place.launcher != "torchrun" or place.world == 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        yield
        return

    def say() -> None:
        others, ledger = [r for r in range(place.world) if r != place.rank], _rank.ledger
        with contextlib.suppress(dist.DistError):
            if ledger is not None:
                others = [r for r in others if not ledger.store.check([f"met/start/{r}"])]
        host, port = rendezvous.address()
        error_report.say(
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


def _meet(ledger: Ledger, look: hardware.Look, seconds: float) -> list[hardware.Look]:
    """Wait until every rank has come; returns what each of them sees."""
    ledger.store.set(f"pid/{ledger.rank}", json.dumps([*hardware.machine(), os.getpid()]))
    ledger.store.set(f"sees/{ledger.rank}", look.to_json())
    ledger.meet("start", seconds, StartupProgress(lambda: _still_starting(ledger)).made)
    looks = ledger.store.multi_get([f"sees/{r}" for r in range(ledger.world)])
    return [hardware.Look.from_json(text) for text in looks]


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


def _join_group(backend: str, store: dist.Store, place: Place, seconds: float) -> None:
    """Make the default process group.

    It gets no `device_id`, which would put all messages of a pipeline's group on one communicator (`comm/p2p`).
    """
    timeout = watchdog.group_timeout(seconds, backend)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)
    watchdog.watch(backend, seconds)
    if backend == "gloo":
        set_transport(GlooTransport())


def _warn_once(ledger: Ledger) -> None:
    """Print a warning of several ranks once (a notebook joins equal output itself)."""
    show = warnings.showwarning
    if RUN_DIR in os.environ:
        return

    def show_once(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        own, key = str(ledger.rank), hashlib.blake2b(f"{category} {message}".encode(), digest_size=8).hexdigest()
        with contextlib.suppress(dist.DistError):
            if _rank.ledger is ledger and ledger.store.compare_set(f"warned/{key}", "", own).decode() != own:
                return
        show(message, category, *args, **kwargs)

    warnings.showwarning = show_once


def _listen_on_loopback() -> None:
    """Use the loopback interface: all ranks are on this machine."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def _siblings(ledger: Ledger) -> dict[int, int]:
    """{rank: pid} of the other ranks on this machine."""
    pids = _pids(ledger, range(ledger.world))
    return {r: pid for r, pid in pids.items() if r != ledger.rank}


def _still_starting(ledger: Ledger) -> set[int]:
    """Processes of our launcher that have not come to the first meeting: ranks that are still importing."""
    come = [r for r in range(ledger.world) if ledger.store.check([f"met/start/{r}"])]
    return set(procs.children(os.getppid())) - {*_pids(ledger, come).values()}


def _pids(ledger: Ledger, ranks: Iterable[int]) -> dict[int, int]:
    """{rank: pid} of those of the ranks that are on this machine."""
    written, machine = {r: json.loads(ledger.store.get(f"pid/{r}")) for r in ranks}, list(hardware.machine())
    return {r: pid for r, (*of, pid) in written.items() if of == machine}


# -------------------------------------------------------------------------------------------------------- ending


def _excepthook(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
    _leave(_fail(error))


def _overdue(error: Overdue) -> NoReturn:
    """End the process for `launch.watch`: the main thread waits for a communication and cannot raise."""
    _leave(_fail(error))


def _fail(error: BaseException) -> int:
    return error_report.fail(error, _rank.ledger or _ledger_of_a_launcher(), _rank.watch, _rank.seconds)


def _ledger_of_a_launcher() -> Ledger | None:
    """The ledger for an error before `init`: all ranks may have the error, and one should print it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        return ledger_of(rendezvous.place(), error_report.CAUSE_SECONDS)
    except (dist.DistError, ConfigError):
        return None


def _leave(code: int) -> NoReturn:
    """Exit without unwinding: destructors of a broken process group may wait for the other side."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        procs.end_descendants()
    os._exit(code)
