"""The process group of a check: gloo, and a log of what passes through it.

The problem in a sentence: a check must know which communications a program has started, when it has waited for them,
and how many bytes they moved; the program itself uses `torch.distributed` as it would anywhere.

    dist.all_reduce(x, async_op=True) -> CountedGroup.allreduce([x])     a `Call`: bytes, peer, group, time of the start
                                           -> gloo, on copies of x
    handle.wait()                     -> CountedWork.wait()              time of the first wait; x gets its result

`connect` makes every group of the backend "gloo" a `CountedGroup`, which hands each operation to a real one of gloo;
errors are gloo's own. Gloo works on copies, and `wait` brings the results into the program's tensors. So a program
that uses a result before it waits gets the old numbers every time, not by chance, and what it writes into a tensor
after the start does not travel. On a GPU it might: a call that is not in place notes it (`overwritten`).

Times are nanoseconds of the machine's monotonic clock, which all ranks share: they order what ranks do.
"""

# mypy: disable-error-code="override, assignment, call-arg"
# torch declares every operation twice, and its own calls use neither form throughout.

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Work
from torch.utils._python_dispatch import _disable_current_modes

Tensor = torch.Tensor
_GLOO = distributed_c10d.ProcessGroupGloo
# torch 2.14 looks for gloo among the files of its installation, which a check cannot always read: so it looks now.
getattr(distributed_c10d.Backend, "_ensure_backend_registered", str)("gloo")
MAX_CALLS = 50_000  # of one rank

# Methods of a process group, and what users of torch.distributed call them.
_IN_PLACE = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "reduce": "reduce", "broadcast": "broadcast",
}  # fmt: skip
_OUT_OF_PLACE = {
    "allgather": "all_gather", "_allgather_base": "all_gather", "all_gather_single": "all_gather",
    "allgather_coalesced": "all_gather", "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather", "gather": "gather", "scatter": "scatter",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter", "alltoall": "all_to_all", "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
}  # fmt: skip


@dataclasses.dataclass
class Call:
    """One communication of one rank.

    Attributes:
        name: `all_reduce`, `send`, ... as in torch.distributed.
        nbytes: the larger of what it sends and receives.
        peer: the other rank of a send or receive, its place in the case whatever the group; -1 otherwise.
        at: number of torch's operations before it on this rank.
        group: the places in the case of its group's ranks.
        started: when it was started.
        waited: when it was first waited for; None if it never was.
        sent, received: bytes.
        waited_at: as `at`, for the first wait.
        overwritten: whether other numbers stood in what it sends when it was first waited for.
    """

    name: str
    nbytes: int
    peer: int
    at: int
    group: tuple[int, ...] = ()
    started: int = -1
    waited: int | None = None
    sent: int = 0
    received: int = 0
    waited_at: int = 0
    overwritten: bool = False


class Log:
    """What this process has sent and received in the present trial.

    Attributes:
        calls: its communications, in the order of their starts.
        marks: (text, time) of moments that a check marks.
        position: how many operations of torch this rank has done.
        late: numbers of the input that a check hands out one by one (`late`).
        sends: gloo's handles of sends: gloo may give a send up whose handle is gone, and then the other rank hangs in
            place of this one being told that it never waits.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self, position: Callable[[], int] = lambda: 0, late: Any = ()) -> None:
        """Begin a trial."""
        self.calls: list[Call] = []
        self.marks: list[tuple[str, int]] = []
        self.position, self.late, self.sends = position, late, list[Any]()

    def placed(self, members: Sequence[int]) -> list[Call]:
        """The calls with places among these ranks instead of ranks of the world."""
        here = {rank: place for place, rank in enumerate(members)}
        return [
            dataclasses.replace(c, peer=here.get(c.peer, -1), group=tuple(here.get(rank, -1) for rank in c.group))
            for c in self.calls
        ]


LOG = Log()


def mark(text: str) -> None:
    """Give a moment of this rank a place in the order of all ranks."""
    LOG.marks.append((text, time.monotonic_ns()))


def late(index: int) -> float:
    """The number `index` of the input that the exercise calls `late`; marked as `late 3`."""
    mark(f"late {index}")
    return float(LOG.late[index])


def connect(folder: Path, rank: int, world: int, seconds: float) -> None:
    """Initialise the default process group; from now on `backend="gloo"` means `CountedGroup`.

    A default group of before is destroyed when all ranks have come: until then another may still connect to this rank,
    or read the store, which is rank 0's.

    Args:
        folder: one that all ranks of this job can write in: there rank 0 says where its store listens.
        seconds: in which all ranks come, and after which gloo gives up a wait.
    """
    setattr(distributed_c10d, "ProcessGroupGloo", CountedGroup)  # noqa: B010  mypy forbids the assignment
    patience, place = datetime.timedelta(seconds=seconds), folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False, timeout=patience)
        (folder / "new").write_text(str(store.port))
        (folder / "new").rename(place)
    else:
        deadline, pause = time.monotonic() + seconds, 0.001
        while not place.exists() and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 0.25)  # a rank that waits uses no processor (`fresh`)
        port = int(place.read_text())
        store = dist.TCPStore("127.0.0.1", port, world, is_master=False, wait_for_workers=False, timeout=patience)
    store.set(f"came {rank}", "")
    store.wait([f"came {one}" for one in range(world)], patience)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)


@contextlib.contextmanager
def without_a_group() -> Iterator[None]:
    """Meanwhile there is no default process group, as where a program imports its modules."""
    ours = dist.group.WORLD
    distributed_c10d._update_default_pg(None)
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(ours)


def groups_made() -> int:
    """How many groups this process has made, as one of their ranks or not."""
    return int(distributed_c10d._world.group_count)


class CountedGroup(dist.ProcessGroup):
    """Stands in for ProcessGroupGloo; torch makes it, one for each group and member."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: datetime.timedelta | None = None, **options: Any
    ) -> None:
        """`options` are what torch has besides: 2.14 says `enable_reconfigure`."""
        super().__init__(rank, size)
        self._rank, self._size, self._store = rank, size, store
        self.options = types.SimpleNamespace(global_ranks_in_group=[], group_name="", _timeout=timeout)
        self._gloo = dist.ProcessGroup(store, rank, size)
        patience = timeout or distributed_c10d.default_pg_timeout
        self._gloo._register_backend(
            torch.device("cpu"),
            dist.ProcessGroup.BackendType.GLOO,
            _GLOO(store, rank, size, timeout=patience, **options),
        )
        self._gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def _set_sequence_number_for_group(self) -> None:
        """gloo's own begins at 0."""

    @functools.cached_property
    def _ranks(self) -> tuple[int, ...]:
        """Their places in the case. torch sets the options after the constructor, and may not say that it has."""
        return tuple(self.options.global_ranks_in_group) or tuple(range(self._size))

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "gloo"

    _get_backend_name = name

    def getBackendName(self) -> str:  # torch's C++ asks: for "gloo" it would look inside
        return "counted"

    @property
    def group_name(self) -> str:
        return str(self.options.group_name)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def get_group_store(self) -> Any:
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.options._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """The process ends soon."""

    abort = _wait_for_pending_works = shutdown

    def barrier(self, *options: Any, **more: Any) -> CountedWork:
        return self._start("barrier", "barrier", [], [], options, more)

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait(timeout)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> CountedWork:
        return self._start("send", "send", [], tensors, (peer, tag), {}, self._other(peer, "send to"))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> CountedWork:
        return self._start("recv", "recv", tensors, [], (peer, tag), {}, self._other(peer, "receive from"))

    def _other(self, peer: int, what: str) -> int:
        """The rank in the world of a peer; for one that is not there gloo would wait for ever."""
        if not 0 <= peer < self._size:
            raise ValueError(f"there is no rank {peer} to {what}")
        return self._ranks[peer]

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> CountedWork:
        return self._start("recv", "recv_anysource", tensors, [], (tag,), {})

    def _start(
        self, name: str, method: str, outputs: Any, inputs: Any, options: tuple[Any, ...], more: dict[str, Any],
        peer: int = -1,
    ) -> CountedWork:  # fmt: skip
        """Have gloo begin, on copies, and log the call; `outputs is inputs` for what works in place."""
        root = more.get("root", getattr(options[0], "rootRank", None)) if options else more.get("root")
        gives = name not in ("broadcast", "scatter") or root == self._rank
        takes = not (name == "reduce" and root != self._rank or name == "broadcast" and root == self._rank)
        sent, received = _nbytes(inputs) * gives, _nbytes(outputs) * takes
        call = Call(name, max(sent, received), peer, LOG.position(), self._ranks, time.monotonic_ns(), None, sent,
                    received)  # fmt: skip
        if len(LOG.calls) >= MAX_CALLS:
            raise RuntimeError(f"more than {MAX_CALLS:,} communications of one rank")
        with _disable_current_modes():
            into = _copied(outputs)
            of = into if outputs is inputs else _copied(inputs)
            given = {"barrier": (), "send": (of,), "recv": (into,)}.get(name)
            if given is None:
                given = (into,) if outputs is inputs else (into, of)
            work = getattr(self._gloo, method)(*given, *options, **more)
            LOG.calls.append(call)
            LOG.sends += [work] * (name == "send")
            sends = [_Sent(*pair) for pair in zip(_tensors(inputs), _tensors(of), strict=True) if outputs is not inputs]
        return CountedWork(work, call, outputs, into, self._ranks, sends)


def _operation(method: str, name: str, in_place: bool) -> Callable[..., CountedWork]:
    def operation(self: CountedGroup, outputs: Any, *rest: Any, **more: Any) -> CountedWork:
        if in_place:
            return self._start(name, method, outputs, outputs, rest, more)
        return self._start(name, method, outputs, rest[0], rest[1:], more)

    return operation


for _method, _name in (_IN_PLACE | _OUT_OF_PLACE).items():
    setattr(CountedGroup, _method, _operation(_method, _name, _method in _IN_PLACE))


class _Sent:
    """A tensor that is sent and its copy. The tensor's memory is not kept; of a view it is known by its base."""

    def __init__(self, tensor: Tensor, copy: Tensor) -> None:
        base = tensor if tensor._base is None else tensor._base
        self._of, self._copy, self._version = weakref.ref(base), copy, _version(base)
        self._place = tensor.size(), tensor.stride(), tensor.storage_offset()

    def differs(self) -> bool:
        """Whether the tensor, where it still exists, has been written and holds other numbers than its copy."""
        base = self._of()
        if base is None or _version(base) == self._version:
            return False
        now, then = base.detach().as_strided(*self._place), self._copy
        return not bool(((now == then) | (now != now) & (then != then)).all())


class CountedWork(Work):
    """A communication that has been started.

    Args:
        work: gloo's.
        call: its entry in the log.
        outputs: the program's tensors, which get the results when the program waits.
        into: the tensors that gloo writes into.
        ranks: of the group.
        sends: what the program has sent.
    """

    def __init__(
        self, work: Any, call: Call, outputs: Any, into: Any, ranks: tuple[int, ...], sends: Sequence[_Sent]
    ) -> None:
        super().__init__()
        self._sends = sends
        self._work, self._call, self._outputs, self._into, self._ranks = work, call, outputs, into, ranks
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self._note_wait()
        with _disable_current_modes():
            done = self._work.wait() if timeout is None else self._work.wait(timeout)  # no deadline: the group's
        self._collect()
        return bool(done)

    def _note_wait(self) -> None:
        if self._call.waited is None:
            self._call.waited, self._call.waited_at = time.monotonic_ns(), LOG.position()
            with _disable_current_modes():
                self._call.overwritten, self._sends = any(one.differs() for one in self._sends), []

    def _collect(self) -> None:
        """Bring the results into the program's tensors; autograd does not see it, as with gloo."""
        with self._lock:  # all of it: a wait returns when the results are there, whichever thread brings them
            into, self._into = self._into, None
            if into is not None:
                with _disable_current_modes():
                    for output, result in zip(_tensors(self._outputs), _tensors(into), strict=True):
                        output.data.copy_(result)
        if self._call.name == "recv" and self._call.peer < 0:
            self._call.peer = self._ranks[self._work._source_rank()]

    def is_completed(self) -> bool:
        done = bool(self._work.is_completed())
        if done and self._work.exception() is None:
            self._note_wait()
            self._collect()
        return done

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        return list(_tensors(self._outputs))

    def synchronize(self) -> None:
        self.wait()  # no deadline: the group's

    def source_rank(self) -> int:
        return int(self._work._source_rank())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future; `wait` of it counts as a wait for this."""
        if self._future is None:
            self._future = mine = _Future()
            mine.work = self

            def arrived(done: Any) -> None:
                try:
                    done.value()
                    self._collect()
                    mine.set_result(self.result())  # no deadline: it is there
                except RuntimeError as error:
                    mine.set_exception(error)

            self._work.get_future().add_done_callback(arrived)
        return self._future


_HERE = threading.local()  # `of`: the communication whose callback this thread runs


class _Future(torch.futures.Future):  # type: ignore[misc, unused-ignore]
    work: CountedWork | None = None

    def wait(self) -> Any:
        """The value. In a callback of the same communication it is there, and when that runs is chance: no wait."""
        if self.work is not None and getattr(_HERE, "of", None) is not self.work:
            self.work._note_wait()
        return super().wait()  # no deadline: the group's

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        def called_back(done: torch.futures.Future[Any]) -> None:
            before, _HERE.of = getattr(_HERE, "of", None), self.work
            try:
                callback(done)
            finally:
                _HERE.of = before

        super().add_done_callback(called_back)

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> torch.futures.Future[Any]:
        """A future of what `callback` makes of this; `wait` of it counts as a wait, too."""
        after = _Future()
        after.work = self.work

        def go_on(done: torch.futures.Future[Any]) -> None:
            try:
                after.set_result(callback(done))
            except Exception as error:  # raised where it is waited for, as torch does
                after.set_exception(error)

        self.add_done_callback(go_on)
        return after


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)]


def _version(tensor: Tensor) -> int:
    """How often it has been written; tensors of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _nbytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(value))


def _copied(value: Any) -> Any:
    """The tensors with memory of their own, and the strides that they have."""
    if not isinstance(value, torch.Tensor):
        return [_copied(one) for one in value]
    if value.layout != torch.strided or 0 in value.stride():
        return value.detach()
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).copy_(value.detach())
