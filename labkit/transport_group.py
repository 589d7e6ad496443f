"""torch.distributed for a process without sockets: a process group, and a store, that talk to the judge's broker.

`connect(line)` makes every group of the backend "gloo" one of ours. The learner's code sees no difference: the same
functions, the same errors, `get_backend()` is "gloo". An operation sends its input over the line and returns a `Work`;
`wait()` asks the broker for the result and copies it into the outputs. There is no other way to get it, so what was
started, and when it was waited for, is known outside of this process.

    dist.all_reduce(x) -> BrokerGroup.allreduce([x]) -> line: start ... wait -> transport -> x.copy_(result)

What gloo refuses is refused here in gloo's words (dtypes, sizes, inputs that are not contiguous), before anything is
sent. See torch/testing/_internal/distributed/multi_threaded_pg.py for another group in Python.
"""

# mypy: disable-error-code="override, assignment, call-arg"
# torch declares every operation twice, and its own calls use neither form throughout.

from __future__ import annotations

import datetime
import math
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ReduceOp, Work
from torch.utils._python_dispatch import _disable_current_modes

from labkit.channel import Line
from labkit.transport_store import BrokerStore

Tensor = torch.Tensor
_DTYPES = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64,
    torch.bool,
}  # fmt: skip
_REDUCE = {
    name: getattr(ReduceOp, name.upper()) for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
}
_LONG = datetime.timedelta(minutes=5)  # a timeout of so much is none


class _Link:
    """What the groups of this process share."""

    line: Line | None = None
    store: BrokerStore | None = None  # torch's C++ side keeps no Python object alive
    position: Callable[[], int] = staticmethod(lambda: 0)  # how many operations of torch this rank has done
    trial = 0
    spoiled: Sequence[Tensor] = ()  # overwritten when the first wait begins

    @classmethod
    def tell(cls, do: str, tensors: Sequence[Tensor] = (), **facts: Any) -> int:
        assert cls.line is not None
        return cls.line.tell({"to": "transport", "do": do, "at": cls.position(), **facts}, tensors)

    @classmethod
    def ask(cls, do: str, **facts: Any) -> tuple[dict[str, Any], list[Tensor]]:
        assert cls.line is not None
        threads = len(sys._current_frames())  # one that does not wait could still send
        return cls.line.ask({"to": "transport", "do": do, "at": cls.position(), "threads": threads, **facts})


def connect(line: Line, rank: int, world: int) -> None:
    """Initialise the default process group over a line; from now on `backend="gloo"` means this."""
    _Link.line, _Link.store = line, BrokerStore(line)
    setattr(distributed_c10d, "ProcessGroupGloo", BrokerGroup)  # noqa: B010  mypy forbids the assignment
    dist.init_process_group("gloo", store=_Link.store, rank=rank, world_size=world)


def watch(position: Callable[[], int]) -> None:
    """Send with each message how many operations of torch this rank has done."""
    _Link.position = staticmethod(position)


def begin(trial: int, spoiled: Sequence[Tensor]) -> None:
    """A trial begins. When its first wait does, these are overwritten with NaN: what needs them must come before."""
    _Link.trial, _Link.spoiled = trial, [tensor for tensor in spoiled if tensor.is_floating_point()]


def mark(name: str) -> None:
    """Give a moment of this rank a place in the broker's order; nothing happens where there is no broker."""
    if _Link.line is not None:
        _Link.tell("mark", name=name)


def late(index: int) -> float:
    """The number `index` of the input that the exercise calls `late`, which only now leaves the judge.

    Work that needs it comes after this moment, and what the broker has seen before came before it. A mark says the same
    of a program that tells the truth. In the evidence it is the mark `late 3`.
    """
    return float(_Link.ask("late", trial=_Link.trial, index=index)[0]["number"])


def finish(took_part: bool = True) -> None:
    """Tell the broker that this rank has returned and sends nothing more, and how many groups it has made."""
    if _Link.line is not None:
        _Link.tell("done", took_part=took_part, groups=distributed_c10d._world.group_count)


class BrokerWork(Work):
    """Something that was started.

    Args:
        number: of the message that started it.
        outputs: where the result goes.
        put: copies the tensors of the answer there.
    """

    def __init__(self, number: int, outputs: list[Tensor], put: Callable[[list[Tensor]], None]) -> None:
        super().__init__()
        self._number, self._outputs, self._put = number, outputs, put
        self._lock = threading.Lock()
        self._done, self._collecting = False, False
        self._error: RuntimeError | None = None
        self._source = -1
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        while _Link.spoiled:
            _Link.spoiled.pop().data.fill_(torch.nan)  # type: ignore[attr-defined]
        if self._collecting:
            _Link.tell("wait", work=self._number, note=True)
        short = timeout is not None and datetime.timedelta(0) < timeout < _LONG
        return self._collect(seconds=timeout.total_seconds() if timeout is not None and short else None)

    def _collect(self, do: str = "wait", **facts: Any) -> bool:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._done:
                return True
            try:
                head, tensors = _Link.ask(do, work=self._number, **facts)
            except RuntimeError as error:
                if "timed out after" not in str(error):
                    self._error = error
                raise
            if not head.get("ready", True):
                return False
            with _disable_current_modes():
                self._put(tensors)
            self._source, self._done = head.get("source", -1), True
            return True

    def is_completed(self) -> bool:
        try:
            return self._collect("test")
        except RuntimeError:
            return True

    def is_success(self) -> bool:
        return self._error is None

    def exception(self) -> RuntimeError | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that a thread completes; `wait` of the future counts as a wait for this."""
        if self._future is None:
            self._future = _Future()
            self._future.work, self._collecting = self, True
            threading.Thread(target=self._fulfil, args=(self._future,), daemon=True).start()
        return self._future

    def _fulfil(self, future: torch.futures.Future[Any]) -> None:
        try:
            self._collect(quiet=True)
            future.set_result(self._outputs)
        except RuntimeError as error:
            future.set_exception(error)


class _Future(torch.futures.Future):  # type: ignore[misc, unused-ignore]
    work: BrokerWork | None = None

    def wait(self) -> Any:
        if self.work is not None:
            _Link.tell("wait", work=self.work._number, note=True)
        return super().wait()


class BrokerGroup(dist.ProcessGroup):
    """Stands in for ProcessGroupGloo; torch makes it, one for each group and member."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta | None = None) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._store = rank, size, store
        self.options = types.SimpleNamespace(global_ranks_in_group=[], group_name="", _timeout=timeout)

    def _set_sequence_number_for_group(self) -> None:
        """The last that torch does with a new group: wait for its other members, as gloo does."""
        self._name = str(self.options.group_name)
        ranks = list(self.options.global_ranks_in_group) or list(range(self._size))
        _Link.ask("group", name=self._name, ranks=ranks)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "gloo"

    _get_backend_name = name

    def getBackendName(self) -> str:  # noqa: N802  torch's C++ asks: for "gloo" it would look inside
        return "broker"

    @property
    def group_name(self) -> str:
        return self._name

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
        """Nothing is open."""

    abort = _wait_for_pending_works = shutdown

    # ---------------------------------------------------------------------------------------------- operations

    def _start(
        self, op: str, inputs: Sequence[Tensor], outputs: list[Tensor],
        put: Callable[[list[Tensor]], None] | None = None, **facts: Any,
    ) -> BrokerWork:  # fmt: skip
        with _disable_current_modes():
            number = _Link.tell("start", inputs, group=self._name, op=op, **facts)
        return BrokerWork(number, outputs, put or (lambda given: _copy(outputs, given)))

    def allreduce(self, tensors: Any, opts: Any = None, **_: Any) -> BrokerWork:
        tensors = _many(tensors)
        return self._start("all_reduce", tensors, tensors, units=_units(tensors), shape=list(tensors[0].shape),
                           reduce=_reduce(opts, tensors))  # fmt: skip

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, **more: Any) -> BrokerWork:
        tensors = _many(tensors)
        return self._start("reduce", tensors, tensors, units=_units(tensors), shape=list(tensors[0].shape),
                           reduce=_reduce(opts, tensors), root=_root(opts, more))  # fmt: skip

    def broadcast(self, tensors: Any, opts: Any = None, **more: Any) -> BrokerWork:
        tensors, root = _many(tensors), _root(opts, more)
        given = tensors if self._rank == root else []
        return self._start("broadcast", given, tensors, units=_units(tensors), shape=list(tensors[0].shape), root=root)

    def barrier(self, opts: Any = None, timeout: Any = None) -> BrokerWork:
        return self._start("barrier", [], [])

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait(timeout)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> BrokerWork:
        [given], [lists] = _many(inputs), outputs if isinstance(outputs[0], list | tuple) else [outputs]
        self._same("allgather", lists, given)
        return self._gathered("all_gather", lists, given)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> BrokerWork:
        return self.all_gather_single_coalesced([output], [given])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> BrokerWork:
        for output, given in zip(outputs, inputs, strict=True):
            if output.dtype != given.dtype:
                raise RuntimeError(f"output of {output.dtype}, input of {given.dtype}")
            self._same("allgather", list(output.chunk(self._size)) if output.ndim else [output], given)
        return self._start("all_gather", inputs, outputs, units=_units(inputs), shape=list(inputs[0].shape))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> BrokerWork:
        lists = [list(one) for one in zip(*output_lists, strict=True)]  # by tensor, then by rank
        for one, given in zip(lists, inputs, strict=True):
            self._same("allgather_coalesced", one, given)

        def put(tensors: list[Tensor]) -> None:
            for one, tensor in zip(lists, tensors, strict=True):
                _fill(one, tensor)

        flat = [tensor for one in output_lists for tensor in one]
        return self._start("all_gather", inputs, flat, put, units=_units(inputs), shape=list(inputs[0].shape))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> BrokerWork:
        [given], root = _many(inputs), _root(opts, more)
        lists: list[Tensor] = (outputs[0] if isinstance(outputs[0], list | tuple) else outputs) if outputs else []
        if self._rank == root:
            self._same("gather", lists, given)
        return self._gathered("gather", lists, given, root=root)

    def _gathered(self, op: str, lists: list[Tensor], given: Tensor, **facts: Any) -> BrokerWork:
        def put(tensors: list[Tensor]) -> None:
            for tensor in tensors:
                _fill(lists, tensor)

        return self._start(op, [given], list(lists), put, units=_units([given]), shape=list(given.shape), **facts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> BrokerWork:
        [output], root = _many(outputs), _root(opts, more)
        lists: list[Tensor] = (inputs[0] if isinstance(inputs[0], list | tuple) else inputs) if inputs else []
        if self._rank == root:
            self._same("scatter", lists, output)
        given = [_joined(lists)] if self._rank == root else []
        return self._start("scatter", given, [output], units=_units([output]), shape=list(output.shape), root=root)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> BrokerWork:
        [output] = _many(outputs)
        lists: list[Tensor] = inputs[0] if isinstance(inputs[0], list | tuple) else inputs
        self._same("reduce_scatter", lists, output)
        return self._start("reduce_scatter", [_joined(lists)], [output], units=_units([output]),
                           shape=list(output.shape), reduce=_reduce(opts, lists))  # fmt: skip

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> BrokerWork:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> BrokerWork:
        for output, given in zip(outputs, inputs, strict=True):
            if output.dtype != given.dtype:
                raise RuntimeError(f"output of {output.dtype}, input of {given.dtype}")
            self._same("reduce_scatter", list(given.chunk(self._size)) if given.ndim else [given], output)
        return self._start("reduce_scatter", inputs, outputs, units=_units(outputs), shape=list(outputs[0].shape),
                           reduce=_reduce(opts, inputs))  # fmt: skip

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, given: Tensor, take: list[int], give: list[int], opts: Any = None, **_: Any
    ) -> BrokerWork:
        if not given.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        if output.dtype != given.dtype:
            raise RuntimeError(f"output of {output.dtype}, input of {given.dtype}")
        give, take = (self._splits(list(splits), tensor) for splits, tensor in ((give, given), (take, output)))
        return self._exchange([_as_it_lies(output)], given, give, take, math.prod(given.shape[1:]))

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, **_: Any) -> BrokerWork:
        if not len(outputs) == len(inputs) == self._size:
            raise RuntimeError("Number of tensor splits not equal to group size")
        for tensors in (inputs, outputs):
            self._same("alltoall", tensors, tensors[0])
        give, take = [tensor.numel() for tensor in inputs], [tensor.numel() for tensor in outputs]
        return self._exchange(outputs, _joined(inputs), give, take, 1)

    def _exchange(self, outputs: list[Tensor], given: Tensor, give: list[int], take: list[int], row: int) -> BrokerWork:
        [[dtype, _]] = _units([given])
        return self._start("all_to_all", [given], outputs, lambda tensors: _fill(outputs, tensors[0]),
                           units=[[dtype, row]], give=give, take=take)  # fmt: skip

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> BrokerWork:
        [tensor] = tensors
        _contiguous(tensor)
        return self._start("send", [tensor], [], peer=target, tag=tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> BrokerWork:
        if source < 0:  # to the broker any source; gloo waits for ever for a rank that is not there
            raise ValueError(f"there is no rank {source} to receive from")
        return self._recv(tensors, source, tag)

    def _recv(self, tensors: list[Tensor], source: int, tag: int) -> BrokerWork:
        [tensor] = tensors
        _contiguous(tensor)

        def put(given: list[Tensor]) -> None:
            _fill([tensor], given[0].view(tensor.dtype))

        [[dtype, _]] = _named([tensor])
        return self._start("recv", [], [tensor], put, peer=source, tag=tag, nbytes=tensor.nbytes, dtype=dtype,
                           shape=list(tensor.shape))  # fmt: skip

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> BrokerWork:
        return self._recv(tensors, -1, tag)

    # -------------------------------------------------------------------------------------------------- checks

    def _same(self, op: str, many: Sequence[Tensor], one: Tensor) -> None:
        """One tensor for each rank, of one shape, as gloo asks."""
        if len(many) != self._size:
            raise RuntimeError(f"ProcessGroupGloo::{op}: invalid output tensor list at index 0 (expected length "
                               f"{self._size}, got {len(many)})")  # fmt: skip
        for i, tensor in enumerate(many):
            if tensor.dtype != one.dtype:
                raise RuntimeError(f"ProcessGroupGloo::{op}: invalid tensor type at index {i} (expected {one.dtype}, "
                                   f"got {tensor.dtype})")  # fmt: skip
            if tensor.shape != one.shape:
                want, got = (f"({', '.join(map(str, shape))})" for shape in (one.shape, tensor.shape))
                raise RuntimeError(f"ProcessGroupGloo::{op}: invalid tensor size at index {i} (expected {want}, "
                                   f"got {got})")  # fmt: skip

    def _splits(self, splits: list[int], tensor: Tensor) -> list[int]:
        rows = tensor.shape[0]
        if not splits:
            if rows % self._size:
                raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
            return [rows // self._size] * self._size
        if len(splits) != self._size:
            raise RuntimeError("Number of tensor splits not equal to group size")
        if sum(splits) != rows:
            raise RuntimeError("Split sizes doesn't match total dim 0 size")
        return splits


def _many(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _units(tensors: Sequence[Tensor]) -> list[list[Any]]:
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise RuntimeError("Invalid scalar type")
        if tensor.layout != torch.strided:
            raise RuntimeError("unsupported layout")
    return _named(tensors)


def _named(tensors: Sequence[Tensor]) -> list[list[Any]]:
    return [[str(tensor.dtype).removeprefix("torch."), tensor.numel()] for tensor in tensors]


def _reduce(opts: Any, tensors: Sequence[Tensor]) -> str:
    op = getattr(opts, "reduceOp", opts)
    op = ReduceOp.SUM if op is None else op
    name = next((name for name, one in _REDUCE.items() if op == one), None)
    if name is None:
        raise RuntimeError("Cannot use ReduceOp.PREMUL_SUM with Gloo")
    floating = tensors[0].is_floating_point()
    if name in ("band", "bor", "bxor") and floating:
        raise RuntimeError(f"Cannot use ReduceOp.{name.upper()} with non-integral dtype")
    if name == "avg" and not floating:
        tensors[0].new_ones(1).div_(2)  # raises
    return name


def _root(opts: Any, more: dict[str, Any]) -> int:
    return int(more.get("root", getattr(opts, "rootRank", opts)))


def _as_it_lies(output: Tensor) -> Tensor:
    """The memory of an output, in its order: gloo's all-to-all writes there and asks nobody for the strides."""
    return output if output.is_contiguous() else output.detach().as_strided((output.numel(),), (1,))


def _contiguous(tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise RuntimeError("input tensor has to be contiguous")


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    with _disable_current_modes():
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _copy(outputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    for output, tensor in zip(outputs, given, strict=False):  # one that gets nothing keeps what it has
        _fill([output], tensor)


def _fill(outputs: Sequence[Tensor], given: Tensor) -> None:
    """Cut flat numbers into outputs, one after the other; autograd does not see it, as with gloo."""
    for output, flat in zip(outputs, given.split([output.numel() for output in outputs]), strict=True):
        output.data.copy_(flat.view(output.shape))
