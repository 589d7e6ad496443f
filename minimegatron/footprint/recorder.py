"""Records what happens while modules run: the bytes that are alive, operations, and messages.

`Recorder` is a dispatch mode: torch calls it for every operator. Module hooks tell it which module runs, autograd's
hooks which tensors are saved, and an observer of communications (`Messages`) what is sent.

| what              | how it is known                                                                       |
|-------------------|---------------------------------------------------------------------------------------|
| bytes alive       | storages of results, through weak references; without weights and gradient buffers    |
| kept for backward | storages that are alive when the forward pass has ended                               |
| operations        | operators: FLOPs of products (`gpu.flops_of`), bytes of inputs and results            |
| messages          | what the transport is given, and when it is waited for                                |

Bytes of an operation are those of its inputs and results; of a table only the rows that are looked up. Neighbouring
elementwise operators count as fused, and so does a sum right after a product (of a bias, or into the buffer of
gradients): the tensor between the two is neither written nor read.

`events` says what the recording consists of. In the backward pass the window of an event is known by the sequence
number of the autograd node that runs.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from minimegatron.comm import async_ops
from minimegatron.comm.transport import FakeTransport
from minimegatron.footprint.events import (
    AGAIN,
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Event,
    Message,
    Operation,
    Sent,
    Waited,
    Window,
)
from minimegatron.footprint.gpu import flops_of

ALLOCATES = {f"aten.{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
ELEMENTWISE = {
    f"aten.{name}"
    for name in "_to_copy add add_ copy_ div exp eq logaddexp masked_fill mul mul_ native_dropout sub where".split()
}
LOOKS_UP = {f"aten.{name}" for name in ("embedding", "gather", "index", "index_select")}


class Recorder(TorchDispatchMode):
    """Records operators, memory and messages while a stage runs.

    Args:
        parts: modules of each part, in the order in which they run. What runs outside of them belongs before the first
            part, or after the last part that has run.
        names: modules that have windows of their own, and their names.

    Attributes:
        windows: in the order of the forward pass.
        ignored: keys of storages that are not counted.
    """

    def __init__(self, parts: Sequence[Sequence[nn.Module]], names: dict[nn.Module, str]) -> None:
        super().__init__()
        self.windows: list[Window] = []
        self.phase = FORWARD
        self._part_of = {id(m): i for i, some in enumerate(parts, 1) for one in some for m in one.modules()}
        self._parts = len(parts)
        self._tops = {id(one) for some in parts for one in some}
        self._names = {id(module): name for module, name in names.items()}
        self._stack: list[tuple[str, str, int | None]] = []  # of a module: name, class, part
        self._begun: set[int] = set()
        self._last = 0
        self.ignored: set[int] = set()
        self._live: dict[int, tuple[Any, int]] = {}
        self._owner: dict[int, tuple[bool, Window]] = {}  # whether autograd has saved it; where it was made or saved
        self._alive = 0
        self.events: list[Event] = []
        self._fresh = dict[int, int]()  # key of what elementwise operations in a row have made -> number of their event
        self.put_off_in: int | None = None  # number of the window whose weights' half runs
        self._backward = 0
        self._open("", "")

    # ------------------------------------------------------------------------------------------------- the windows

    def _open(self, name: str, kind: str) -> None:
        """Begin a window; only in the forward pass."""
        if self.phase == FORWARD:
            self.windows.append(Window(name, kind, self._part, torch.autograd._get_sequence_nr()))

    def entered(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook."""
        if id(module) not in self._names:
            return
        if id(module) in self._tops and self.phase == FORWARD:
            self._begun.add(id(module))
            self._last = self._part_of[id(module)]
        again = self.phase == FORWARD or torch.is_grad_enabled()  # else an autograd function has called a module
        name, kind = (self._names[id(module)], type(module).__name__) if again else ("", "")
        self._stack.append((name, kind, self._part_of.get(id(module))))
        self._open(name, kind)
        if id(module) in self._tops and args and isinstance(args[0], torch.Tensor):
            self._own(args[0], False)

    def left(self, module: nn.Module, args: Any, result: Any) -> None:
        """Forward hook, also where an error ends the forward pass."""
        if id(module) not in self._names:
            return
        self._stack.pop()
        self._open(*(self._stack[-1][:2] if self._stack else ("", "")))

    @property
    def _part(self) -> int:
        """Number of the part that runs now; 0 before the first."""
        return self._within or (self._parts + 1 if len(self._begun) == len(self._tops) else self._last)

    @property
    def _within(self) -> int | None:
        return self._stack[-1][2] if self._stack else None

    @property
    def at(self) -> int:
        """Number of the window of the operator that is dispatched now."""
        if self.phase == FORWARD:
            return len(self.windows) - 1
        if self.put_off_in is not None:
            return self.put_off_in
        if self.now == AGAIN:
            name, _, part = self._stack[-1]
            return next(i for i, w in enumerate(self.windows) if w.name == name and part in (w.part, None))
        node = torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            if number < 2**63:
                self._backward = max(0, bisect.bisect_right(self.windows, number, key=lambda w: w.first) - 1)
        return self._backward

    @property
    def window(self) -> Window:
        return self.windows[self.at]

    @property
    def now(self) -> str:
        """The phase now."""
        return AGAIN if self.phase == BACKWARD and self._stack and self._stack[-1][0] else self.phase

    # ------------------------------------------------------------------------------------------------- the memory

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Do not count these tensors: weights and lasting buffers, whose bytes are counted elsewhere."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            self.ignored.add(key)
            if key in self._live:
                self._alive -= self._live.pop(key)[1]
                self._owner.pop(key, None)

    def see(self, tensor: torch.Tensor) -> None:
        """Count the storage of a result from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self.ignored:
            return
        nbytes = storage.nbytes()
        self._live[key] = weakref.ref(storage, partial(self._ended, key)), nbytes
        self._owner[key] = False, self.window
        self._alive += nbytes
        self._sample()

    def _ended(self, key: int, _: object) -> None:
        if key in self._live:
            self._alive -= self._live.pop(key)[1]
            self._owner.pop(key, None)

    def _sample(self) -> None:
        window, phase = self.window, BACKWARD if self.now == AGAIN else self.now
        window.most[phase] = max(window.most.get(phase, 0), self._alive)

    def _own(self, tensor: torch.Tensor, saved: bool) -> None:
        """Assign the tensor to this window, unless an earlier window has saved it."""
        key = tensor.untyped_storage()._cdata
        if self.phase == FORWARD and key in self._owner and not self._owner[key][0]:
            self._owner[key] = saved, self.windows[-1]

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd saves a tensor.

        A tensor that was made before the first part, and is no part's input, is shared by all parts and belongs to
        none.
        """
        self.see(tensor)
        _, window = self._owner.get(tensor.untyped_storage()._cdata, (True, self.windows[-1]))
        if window.part and (self._within or self._part > self._parts):
            self._own(tensor, True)
        # An operation that saved its own result would hold itself; nothing ends that if no loss depends on it.
        return tensor if tensor.is_leaf else tensor.detach()

    def forward_ended(self) -> None:
        """Count what is alive now as kept for the backward pass."""
        self._open("", "")
        self._backward = len(self.windows) - 1
        for key, (_, window) in self._owner.items():
            window.keeps += self._live[key][1]
        self.phase = BACKWARD

    def backward_ended(self) -> dict[int, int]:
        """Begin the wgrad phase. Returns {number of a window: its bytes that are still alive}."""
        self.phase, place = WEIGHTS, {id(window): number for number, window in enumerate(self.windows)}
        found: dict[int, int] = {}
        for key, (_, window) in self._owner.items():
            found[place[id(window)]] = found.get(place[id(window)], 0) + self._live[key][1]
        return found

    def left_over(self) -> dict[int, tuple[int, int]]:
        """{key of a storage that is alive: (its part, its bytes)}."""
        return {key: (window.part, self._live[key][1]) for key, (_, window) in self._owner.items()}

    # ---------------------------------------------------------------------------------------------- the operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Of torch: else the first operation imports `torch._dynamo`, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results, given = list(_tensors(result)), [*_tensors(args), *_tensors(list((kwargs or {}).values()))]
        for leaf in results:
            self.see(leaf)
        own = {leaf.untyped_storage()._cdata for leaf in given}
        new = [leaf for leaf in results if leaf.untyped_storage()._cdata not in own]
        name, mutates = _about(func)
        count = flops_of(func)
        if name in ALLOCATES or not (new and given or count or mutates):
            return result
        flops = float(count(*args, **(kwargs or {}), out_val=result)) if count is not None else 0.0
        if name in LOOKS_UP:  # of the first one, the rows that are in the result
            given = [*given[1:], *new]
        elif name == "aten.copy_":  # the first one is written alone
            given = given[1:]
        touched = [*given, *(new or results)]
        nbytes = sum(leaf.numel() * leaf.element_size() for leaf in touched)
        chain = self._fresh if name in ELEMENTWISE else {}
        nbytes -= self._fused(given, chain)
        made = new if flops or name in ELEMENTWISE else []
        self._fresh = chain | {leaf.untyped_storage()._cdata: len(self.events) for leaf in made}
        self.note(Operation(name, flops, nbytes))
        return result

    def _fused(self, given: list[torch.Tensor], chain: dict[int, int]) -> int:
        """Bytes that fusion saves: inputs that the operator just before has made, which are then not written either."""
        total = 0
        for leaf in given:
            number = chain.pop(leaf.untyped_storage()._cdata, None)
            if number is not None:
                window, phase, maker = self.events[number]
                assert isinstance(maker, Operation), "messages make nothing fresh"
                nbytes = min(leaf.numel() * leaf.element_size(), maker.nbytes)
                self.events[number] = Event(window, phase, dataclasses.replace(maker, nbytes=maker.nbytes - nbytes))
                total += leaf.numel() * leaf.element_size()
        return total

    def note(self, what: Operation | Sent | Waited) -> None:
        """Record an event of the current window and phase."""
        if not isinstance(what, Operation):
            self._fresh = {}
        self.events.append(Event(self.at, self.now, what))


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for each in x:
            yield from _tensors(each)


@functools.cache
def _about(operator: Any) -> tuple[str, bool]:
    """The operator's name, and whether it changes an argument."""
    return str(operator._overloadpacket), operator._schema.is_mutable


class Messages(async_ops.Observer):
    """Calls `note` with a `Sent` for every message, and with its `Waited`."""

    def __init__(self, note: Callable[[Sent | Waited], None]) -> None:
        self._note = note
        self._under_way: dict[int, Sent] = {}  # by the id of a work

    def issue(self, work: async_ops.Work) -> None:
        if work.event is not None:
            sent = Sent(Message(work.event["name"], work.event["axis"], work.event["nbytes"]))
            self._under_way[id(work)] = sent
            self._note(sent)

    def waited(self, work: async_ops.Work) -> None:
        if id(work) in self._under_way:
            self._note(Waited(self._under_way.pop(id(work))))


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """In the block the recorder records, and every message arrives at once."""
    handles = [
        hooks.register_module_forward_pre_hook(recorder.entered),
        hooks.register_module_forward_hook(recorder.left, always_call=True),
    ]
    alone = async_ops.alone(FakeTransport(), Messages(recorder.note))
    try:
        with alone, torch.autograd.graph.saved_tensors_hooks(recorder.saved, lambda x: x), recorder:
            yield
    finally:
        for handle in handles:
            handle.remove()
