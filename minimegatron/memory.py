"""Bytes alive, by owner, at every moment of a step: what fills the memory, and when it is fullest.

    bytes |              ____ peak
          |            _/####\\_            activations    grow through the forward pass
          |          _/######## \\_
          |~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~  gradients
          |------------------------------  moments, main parameters, parameters
          +------------------------------ time

A tensor's memory is its *storage*: views share one, and it is alive as long as any of them is. torch's CPU allocator
keeps no statistics, so `Tracker` sees every operation (`TorchDispatchMode`) and holds weak references to the storages
of its results. Each storage has an owner:

| owner            | how it is known                                                          |
|------------------|--------------------------------------------------------------------------|
| that of `of`     | named when the tracker is made: parameters, gradients, moments, ...       |
| that of `owned`  | named in the code that makes it: buffers of communication                |
| `activations`    | autograd has saved it for a backward pass (`saved_tensors_hooks`)        |
| `workspace`      | everything else: what one operation hands to the next                    |

On a GPU use `torch.cuda.memory` instead: its snapshots include what Python does not see (cuBLAS, NCCL, fragmentation).

torch's `torch.distributed._tools.mem_tracker` works in the same way with other categories; Megatron-LM reports
predicted totals in `megatron/training/theoretical_memory_usage.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ACTIVATIONS, WORKSPACE = "activations", "workspace"

_trackers: list[Tracker] = []


@dataclasses.dataclass(frozen=True)
class Sample:
    """The memory at one moment.

    Attributes:
        seconds: since the tracker began.
        owners: {owner: bytes}.
        where: the innermost `phase` at that moment, and the last name given to `Tracker.tell`.
        operation: torch's operation during which the memory changed.
    """

    seconds: float
    owners: Mapping[str, int]
    where: str = ""
    operation: str = ""

    @property
    def total(self) -> int:
        return sum(self.owners.values())


class Tracker(TorchDispatchMode):
    """In the block, counts the bytes that are alive.

    Args:
        of: {owner: tensors} that are alive already.

    Attributes:
        samples: one whenever the total has changed, in order.
    """

    def __init__(self, of: Mapping[str, Iterable[torch.Tensor]] | None = None) -> None:
        super().__init__()
        self.samples: list[Sample] = []
        self._live: dict[int, tuple[weakref.ref[Any], int, str]] = {}  # by the storage's address
        self._totals: dict[str, int] = {}
        self._where: list[str] = []
        self._told = self._operation = ""
        self._watching = False
        self._saved: Any = None
        for owner, tensors in (of or {}).items():
            for tensor in tensors:
                self.see(tensor, owner)

    @property
    def peak(self) -> Sample:
        """The first moment with the most bytes alive."""
        return max(self.samples, key=lambda sample: sample.total)

    def see(self, tensor: torch.Tensor, owner: str = "") -> None:
        """Count a tensor's storage, under this owner if one is given."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        name = owner or (known[2] if known else WORKSPACE)
        if known and (known[1], known[2]) == (nbytes, name):
            return
        if known:
            self._add(known[2], -known[1])
        ended = known[0] if known else weakref.ref(storage, partial(self._forget, key))
        self._live[key] = ended, nbytes, name
        self._add(name, nbytes)
        self._sample()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase of the step in the block, for `Sample.where`."""
        self._where.append(name)
        yield
        self._where.pop()

    def tell(self, where: str) -> None:
        """Name what runs inside of the phase from now on, e.g. a layer."""
        self._told = where

    def __enter__(self) -> Tracker:
        self._began, self._watching = time.perf_counter(), True
        self._sample()
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = _seen(self, self._resize)  # type: ignore[method-assign]
        self._saved = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda x: x)
        self._saved.__enter__()
        _trackers.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        _trackers.remove(self)
        self._saved.__exit__(*exc)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._sample()
        self._watching = False  # what ends later is not of this block

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._operation = str(func)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return result

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd saves a tensor: if it has no owner yet, it is an activation."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        if known is None or known[2] == WORKSPACE:
            self.see(tensor, ACTIVATIONS)
        return tensor

    def _forget(self, key: int, _: object) -> None:
        _, nbytes, owner = self._live.pop(key)
        self._add(owner, -nbytes)
        self._sample()

    def _add(self, owner: str, nbytes: int) -> None:
        self._totals[owner] = self._totals.get(owner, 0) + nbytes

    def _sample(self) -> None:
        if self._watching:
            where = ", ".join(filter(None, (*self._where[-1:], self._told)))
            alive = {owner: nbytes for owner, nbytes in self._totals.items() if nbytes}
            self.samples.append(Sample(time.perf_counter() - self._began, alive, where, self._operation))


def _seen(tracker: Tracker, resize: Any) -> Any:
    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        known = tracker._live.get(storage._cdata)
        result = resize(storage, size)
        if known:
            ended, nbytes, owner = known
            tracker._live[storage._cdata] = ended, size, owner
            tracker._add(owner, size - nbytes)
            tracker._sample()
        return result

    return resized


def owned(tensor: torch.Tensor, owner: str) -> torch.Tensor:
    """The tensor, assigned to this owner in every active tracker."""
    for tracker in _trackers:
        tracker.see(tensor, owner)
    return tensor
