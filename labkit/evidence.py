"""What a program did, beside what it returned: messages, bytes, order, and memory.

One's own all-reduce and torch's give the same numbers; so does a "ZeRO" that keeps every optimizer state. So a
check looks at what happened, too:

| what                               | seen by                                                               |
|------------------------------------|-----------------------------------------------------------------------|
| communications, their order, bytes | the process group (`process_group`)                                   |
| matrix products, sizes, memory     | `OpRecorder`, a dispatch mode, before each operation's work           |
| layers and axes                    | `minimegatron.trace`                                                  |
| what a lab's tool has done         | the tool (`labkit.tools.note`): launches of kernels, files on a disk  |

    evidence.count("send"), evidence.nbytes("send")       # of this rank
    evidence.calls[0].started < evidence.calls[1].waited   # one clock for all ranks
    evidence.order                                         # all_reduce, matmul, wait: computed while it was under way
    evidence.largest, evidence.peak, evidence.alive        # bytes; an attention that builds S x S shows here

All of it is taken in the process that runs the learner's code, and sent to the judge as plain data. In a notebook,
over gloo itself, the recorder (`Witness`) sees the communications, their bytes and their order.

`peak` counts storages that were allocated while it ran, until they are freed, without those that were given. `alive`
counts those that still exist at the end, without what was returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.process_group import Call
from minimegatron import trace
from minimegatron.comm import shared_memory

# The names of c10d's operators, as users of torch.distributed know them.
_NAMES = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "send": "send", "recv_": "recv",
    "recv_any_source_": "recv", "broadcast_": "broadcast", "reduce_": "reduce", "barrier": "barrier",
    "allgather_": "all_gather", "_allgather_base_": "all_gather", "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather", "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all", "alltoall_base_": "all_to_all", "gather_": "gather", "scatter_": "scatter",
    "monitored_barrier_": "barrier",
    # the functional collectives, which do not pass through c10d's operators
    "all_reduce": "all_reduce", "all_reduce_coalesced": "all_reduce", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather", "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip
_TALK = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_ATTENTION = {"_scaled_dot_product_flash_attention_for_cpu", "flash_attention"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "dot", "addmv", *_ATTENTION}
_MAX_CALLS = 50_000


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What one rank did while the learner's function ran.

    Attributes:
        calls: its communications, in order.
        events: events of `minimegatron.trace`, in order.
        ops: number of torch's operations.
        largest: bytes of the largest tensor that any operation returned.
        peak: most bytes at one time of tensors that were allocated meanwhile.
        order: (what, how much) in order: communications with their bytes, `matmul` with the elements of its result
            times the length of the sum, `wait` for a communication that was started before.
        places: for each step of `order`, the number of torch's operations before it.
        alive: bytes of tensors that were allocated meanwhile and still exist, without those returned.
        marks: (text, time) of the drive's marks.
        notes: what the lab's tools have noted, by kind (`labkit.tools`).
    """

    calls: tuple[Call, ...] = ()
    events: tuple[trace.Event, ...] = ()
    ops: int = 0
    largest: int = 0
    peak: int = 0
    order: tuple[tuple[str, int], ...] = ()
    places: tuple[int, ...] = ()
    alive: int = 0
    marks: tuple[tuple[str, int], ...] = ()
    notes: dict[str, list[Any]] = dataclasses.field(default_factory=dict)

    def count(self, *names: str) -> int:
        """Number of communications with one of these names; of all, if none is given."""
        return sum(not names or call.name in names for call in self.calls)

    def nbytes(self, *names: str) -> int:
        """Bytes of those communications."""
        return sum(call.nbytes for call in self.calls if not names or call.name in names)

    def to_plain(self) -> dict[str, Any]:
        """For the judge, without the events, which it does not read."""
        return {**vars(self), "calls": [list(vars(call).values()) for call in self.calls], "events": []}

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Evidence:
        calls = tuple(Call(*one) for one in data["calls"])
        pairs = {name: tuple((text, number) for text, number in data[name]) for name in ("order", "marks")}
        return cls(**{**data, **pairs, "calls": tuple(dataclasses.replace(c, group=tuple(c.group)) for c in calls),
                      "events": (), "places": tuple(data["places"])})  # fmt: skip

    def with_calls(self, calls: Sequence[Call], marks: Sequence[tuple[str, int]]) -> Evidence:
        """The evidence with the communications that the process group has seen; `order` has both, by `at`."""
        seen = zip(self.places, self.order, strict=True)
        steps = [(at, -1, step) for at, step in seen if step[0] == "matmul"]  # it comes before what says `at`
        for call in calls:
            steps.append((call.at, call.started, (call.name, call.nbytes)))
            if call.waited is not None:
                steps.append((call.waited_at, call.waited, ("wait", 0)))
        steps.sort(key=lambda step: step[:2])
        order, places = tuple(step for _, _, step in steps), tuple(at for at, _, _ in steps)
        return dataclasses.replace(self, calls=tuple(calls), order=order, places=places, marks=tuple(marks))


class OpRecorder(TorchDispatchMode):
    """Record the operations, communications and memory of one rank.

    with OpRecorder(rank) as recorder:
        learner(x)
    recorder.evidence()
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.order: list[tuple[str, int]] = []
        self.places: list[int] = []
        self.ops = self.largest = self.peak = self._held = 0
        self._storages: dict[int, int] = {}  # those alive, by address; 0 bytes for what was there before
        self._wait: Callable[..., Any] = Work.wait
        self._recorder = trace.record(rank)
        self._log = trace.Log(rank)

    def __enter__(self) -> OpRecorder:
        self._log = self._recorder.__enter__()
        wait, note = self._wait, self._note

        @functools.wraps(wait)
        def noted(work: Any, *args: Any, **kwargs: Any) -> Any:
            note("wait", 0)
            return wait(work, *args, **kwargs)

        setattr(Work, "wait", noted)  # noqa: B010  mypy forbids the assignment
        self._resize, resized = torch.UntypedStorage.resize_, self._resized
        torch.UntypedStorage.resize_ = lambda storage, size: resized(storage, size)  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        setattr(Work, "wait", self._wait)  # noqa: B010
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._recorder.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        for tensor in _tensors((args, kwargs) if kwargs else args):
            self._hold(tensor, given=True)
        result = func(*args, **(kwargs or {}))
        talk = namespace in _TALK and not name.startswith("_wrap_tensor")
        if talk and name == "wait_tensor":
            self._note("wait", 0)
        elif talk and len(self.calls) < _MAX_CALLS:
            nbytes = max([_nbytes(arg) for arg in args] + [_nbytes(result) if namespace != "c10d" else 0])
            peer = args[2] if name in ("send", "recv_") else -1
            if name == "send":  # an envelope stands for what it announces
                nbytes = shared_memory.bytes_of(args[0][0])
            self.calls.append(Call(_NAMES.get(name, name), nbytes, peer, self.ops))
            self._note(_NAMES.get(name, name), nbytes)
        if not talk:
            self.ops += 1
            if name in _PRODUCTS:
                self._note("matmul", _multiply_adds(name, args, result))
        for tensor in _tensors(result):
            if not talk:
                self.largest = max(self.largest, tensor.nbytes)
            self._hold(tensor)
        return result

    def _note(self, what: str, much: int) -> None:
        if len(self.order) < _MAX_CALLS:
            self.order.append((what, much))
            self.places.append(self.ops)

    def _hold(self, tensor: torch.Tensor, given: bool = False) -> None:
        """Count a storage until it is freed; one that is first seen as an input was given."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a tensor of no storage, such as one of oneDNN
            return
        address = storage._cdata
        if address in self._storages:
            return
        self._storages[address] = nbytes = 0 if given else storage.nbytes()
        self._held += nbytes
        self.peak = max(self.peak, self._held)
        weakref.finalize(storage, self._release, address).atexit = False

    def _resized(self, storage: torch.UntypedStorage, size: int) -> Any:
        """Resize a storage. FSDP frees weights so while autograd keeps the tensor, and takes the memory again."""
        before, counted = storage.nbytes(), self._storages.get(storage._cdata)
        result = self._resize(storage, size)
        if counted is not None and (counted or not before):  # 0 with memory: it was given
            self._storages[storage._cdata] = size
            self._held += size - counted
            self.peak = max(self.peak, self._held)
        return result

    def _release(self, address: int) -> None:
        self._held -= self._storages.pop(address, 0)

    def give(self, values: Any) -> None:
        """Tensors that were there before: they are not counted, whatever a program does with them first.

        (`copy.deepcopy` first takes a storage, not a tensor, so that the source would look like a new one.)
        """
        for tensor in _tensors(values):
            self._hold(tensor, given=True)

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether it was allocated meanwhile, so that `alive` and `peak` count it."""
        return self._storages.get(storage._cdata, 0) > 0

    def alive(self, *returned: Any) -> int:
        """Bytes of tensors that were allocated meanwhile and still exist, without those that were returned."""
        mine = set[int]()
        for tensor in _tensors(returned):
            with contextlib.suppress(NotImplementedError):
                mine.add(tensor.untyped_storage()._cdata)
        if any(nbytes and address not in mine for address, nbytes in self._storages.items()):
            gc.collect()  # what only a cycle holds is not kept by the program
        return sum(nbytes for address, nbytes in self._storages.items() if address not in mine)

    def evidence(self, alive: int = 0) -> Evidence:
        log, order = tuple(self._log.events), tuple(self.order)
        return Evidence(tuple(self.calls), log, self.ops, self.largest, self.peak, order, tuple(self.places), alive)


Witness = OpRecorder  # its name in the labs


def _multiply_adds(name: str, args: Any, result: Any) -> int:
    """Elements of the result times the length of each sum."""
    factors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if name in _ATTENTION:  # scores and their weighted sum
        query, key = factors[:2]
        return 2 * query.numel() * key.shape[-2]
    left = factors[-2]
    return math.prod(result.shape) * int(left.shape[-1])


_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that have bytes: for a sparse one its indices and values."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            return [value]
        parts = _SPARSE.get(value.layout)
        return [getattr(value, part)() for part in parts] if parts else [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def _nbytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(value))
