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

import contextlib
import datetime
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from labkit.channel import Line
from labkit.transport_link import Link, begin, finish, late, mark, watch
from labkit.transport_store import BrokerStore
from labkit.transport_tensors import (
    as_it_lies,
    as_list,
    copy_into,
    fill_with,
    joined,
    need_contiguous,
    reduction_of,
    root_of,
    sizes_of,
    units_of,
)
from labkit.transport_work import BrokerWork

__all__ = [
    "BrokerGroup", "BrokerWork", "Link", "begin", "connect", "finish", "late", "mark", "watch", "without_a_group",
]  # fmt: skip

Tensor = torch.Tensor


def connect(line: Line, rank: int, world: int) -> None:
    """Initialise the default process group over a line; from now on `backend="gloo"` means this."""
    Link.line, Link.store = line, BrokerStore(line)
    setattr(distributed_c10d, "ProcessGroupGloo", BrokerGroup)  # noqa: B010  mypy forbids the assignment
    dist.init_process_group("gloo", store=Link.store, rank=rank, world_size=world)  # no deadline: the broker's


@contextlib.contextmanager
def without_a_group() -> Iterator[None]:
    """Meanwhile there is no default process group, as where a program imports its modules. The line stays."""
    ours = dist.group.WORLD
    distributed_c10d._update_default_pg(None)
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(ours)


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
        Link.ask("group", name=self._name, ranks=ranks)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "gloo"

    _get_backend_name = name

    def getBackendName(self) -> str:  # torch's C++ asks: for "gloo" it would look inside
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
        """Nothing to close."""

    abort = _wait_for_pending_works = shutdown

    # ---------------------------------------------------------------------------------------------- operations

    def _start(
        self, op: str, inputs: Sequence[Tensor], outputs: list[Tensor],
        put: Callable[[list[Tensor]], None] | None = None, **facts: Any,
    ) -> BrokerWork:  # fmt: skip
        with _disable_current_modes():
            number = Link.tell("start", inputs, group=self._name, op=op, **facts)
        return BrokerWork(number, outputs, put or (lambda given: copy_into(outputs, given)))

    def allreduce(self, tensors: Any, opts: Any = None, **_: Any) -> BrokerWork:
        tensors = as_list(tensors)
        return self._start("all_reduce", tensors, tensors, units=units_of(tensors), shape=list(tensors[0].shape),
                           reduce=reduction_of(opts, tensors))  # fmt: skip

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, **more: Any) -> BrokerWork:
        tensors = as_list(tensors)
        return self._start("reduce", tensors, tensors, units=units_of(tensors), shape=list(tensors[0].shape),
                           reduce=reduction_of(opts, tensors), root=root_of(opts, more))  # fmt: skip

    def broadcast(self, tensors: Any, opts: Any = None, **more: Any) -> BrokerWork:
        tensors, root = as_list(tensors), root_of(opts, more)
        given = tensors if self._rank == root else []
        return self._start(
            "broadcast", given, tensors, units=units_of(tensors), shape=list(tensors[0].shape), root=root
        )

    def barrier(self, opts: Any = None, timeout: Any = None) -> BrokerWork:
        return self._start("barrier", [], [])

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait(timeout)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> BrokerWork:
        [given], [lists] = as_list(inputs), outputs if isinstance(outputs[0], list | tuple) else [outputs]
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
        return self._start("all_gather", inputs, outputs, units=units_of(inputs), shape=list(inputs[0].shape))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> BrokerWork:
        lists = [list(one) for one in zip(*output_lists, strict=True)]  # by tensor, then by rank
        for one, given in zip(lists, inputs, strict=True):
            self._same("allgather_coalesced", one, given)

        def put(tensors: list[Tensor]) -> None:
            for one, tensor in zip(lists, tensors, strict=True):
                fill_with(one, tensor)

        flat = [tensor for one in output_lists for tensor in one]
        return self._start("all_gather", inputs, flat, put, units=units_of(inputs), shape=list(inputs[0].shape))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> BrokerWork:
        [given], root = as_list(inputs), root_of(opts, more)
        lists: list[Tensor] = (outputs[0] if isinstance(outputs[0], list | tuple) else outputs) if outputs else []
        if self._rank == root:
            self._same("gather", lists, given)
        return self._gathered("gather", lists, given, root=root)

    def _gathered(self, op: str, lists: list[Tensor], given: Tensor, **facts: Any) -> BrokerWork:
        def put(tensors: list[Tensor]) -> None:
            for tensor in tensors:
                fill_with(lists, tensor)

        return self._start(op, [given], list(lists), put, units=units_of([given]), shape=list(given.shape), **facts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> BrokerWork:
        [output], root = as_list(outputs), root_of(opts, more)
        lists: list[Tensor] = (inputs[0] if isinstance(inputs[0], list | tuple) else inputs) if inputs else []
        if self._rank == root:
            self._same("scatter", lists, output)
        given = [joined(lists)] if self._rank == root else []
        return self._start("scatter", given, [output], units=units_of([output]), shape=list(output.shape), root=root)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> BrokerWork:
        [output] = as_list(outputs)
        lists: list[Tensor] = inputs[0] if isinstance(inputs[0], list | tuple) else inputs
        self._same("reduce_scatter", lists, output)
        return self._start("reduce_scatter", [joined(lists)], [output], units=units_of([output]),
                           shape=list(output.shape), reduce=reduction_of(opts, lists))  # fmt: skip

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
        return self._start("reduce_scatter", inputs, outputs, units=units_of(outputs), shape=list(outputs[0].shape),
                           reduce=reduction_of(opts, inputs))  # fmt: skip

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, given: Tensor, take: list[int], give: list[int], opts: Any = None, **_: Any
    ) -> BrokerWork:
        if not given.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        if output.dtype != given.dtype:
            raise RuntimeError(f"output of {output.dtype}, input of {given.dtype}")
        give, take = (self._splits(list(splits), tensor) for splits, tensor in ((give, given), (take, output)))
        return self._exchange([as_it_lies(output)], given, give, take, math.prod(given.shape[1:]))

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, **_: Any) -> BrokerWork:
        if not len(outputs) == len(inputs) == self._size:
            raise RuntimeError("Number of tensor splits not equal to group size")
        for tensors in (inputs, outputs):
            self._same("alltoall", tensors, tensors[0])
        give, take = [tensor.numel() for tensor in inputs], [tensor.numel() for tensor in outputs]
        return self._exchange(outputs, joined(inputs), give, take, 1)

    def _exchange(self, outputs: list[Tensor], given: Tensor, give: list[int], take: list[int], row: int) -> BrokerWork:
        [[dtype, _]] = units_of([given])
        return self._start("all_to_all", [given], outputs, lambda tensors: fill_with(outputs, tensors[0]),
                           units=[[dtype, row]], give=give, take=take)  # fmt: skip

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> BrokerWork:
        [tensor] = tensors
        need_contiguous(tensor)
        return self._start("send", [tensor], [], peer=target, tag=tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> BrokerWork:
        if source < 0:  # to the broker any source; gloo waits for ever for a rank that is not there
            raise ValueError(f"there is no rank {source} to receive from")
        return self._recv(tensors, source, tag)

    def _recv(self, tensors: list[Tensor], source: int, tag: int) -> BrokerWork:
        [tensor] = tensors
        need_contiguous(tensor)

        def put(given: list[Tensor]) -> None:
            fill_with([tensor], given[0].view(tensor.dtype))

        [[dtype, _]] = sizes_of([tensor])
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
