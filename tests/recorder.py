"""A stand-in for CUDA graphs: it plays a recording by running again, and proves that a graph would have done the same.

A graph on a GPU plays the same kernels with the same numbers at the same addresses, whatever the host has meanwhile.
Three things make running again equal to that, and each is checked in every play:

| a recording cannot                      | so here                                                             |
|-----------------------------------------|----------------------------------------------------------------------|
| give the host a number                  | operators whose result the host needs are refused (`NoWaiting`)      |
| notice that the host decides otherwise  | operators, shapes and plain numbers are those of the first play      |
| notice that a tensor is another object  | what is read or written from outside has the first play's addresses  |
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")


class NoWaiting(TorchDispatchMode):
    """Refuse operators whose result the host needs, or whose shape depends on numbers.

    Attributes:
        told: what has been done, in order: operators with the shapes and plain numbers that they were given.
        outside: where the tensors lie that were read or written and not made inside.
    """

    def __init__(self):
        super().__init__()
        self.told, self.outside = [], set()
        self._made = {}  # address -> the storage, kept so that no other can take its place

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, indices = func.overloadpacket.__name__, args[1] if len(args) > 1 else ()
        masks = name.startswith("index") and isinstance(indices, (list, tuple))
        masks = masks and any(i is not None and i.dtype == torch.bool for i in indices)
        assert name not in WAITS and not masks, f"{func} makes the host wait"
        given = tree_leaves((args, kwargs or {}))
        self.told.append((str(func), *(tuple(x.shape) if isinstance(x, torch.Tensor) else str(x) for x in given)))
        self.outside |= {where for where, _ in map(_storage, _tensors(given)) if where not in self._made}
        result = func(*args, **(kwargs or {}))
        fresh = [pair for pair in map(_storage, _tensors(tree_leaves(result))) if pair[0] not in self.outside]
        self._made.update(fresh)
        return result


def _tensors(leaves):
    """But for weights that are laid out for a CPU, which have no address, and which no GPU has."""
    return [x for x in leaves if isinstance(x, torch.Tensor) and not x.is_mkldnn]


def _storage(tensor):
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage


class OnACpu:
    """A `minimegatron.cuda_graphs.Recorder`. At least one call must be a warm-up: it shows what results look like.

    Attributes:
        events: what has happened: "warm", "record", "play".
        places: whether addresses are compared too. Not for a backward pass: autograd makes tensors that no mode sees.
    """

    def __init__(self, places=True):
        self.events, self.places, self._like = [], places, None

    def warm(self, run):
        self.events.append("warm")
        self._like = run()
        return self._like

    def record(self, run):
        self.events.append("record")
        # A recording computes nothing: what the results will be is unknown until it is played.
        places = tree_map(lambda t: torch.full_like(t, torch.nan if t.is_floating_point() else -1), self._like)
        first = []

        def play():
            self.events.append("play")
            with NoWaiting() as watch:
                result = run()
            if not first:
                first.extend([watch.told, watch.outside])
            told, outside = first
            assert told == watch.told, f"the host decided otherwise: {_difference(told, watch.told)}"
            assert not self.places or outside == watch.outside, "a tensor from outside is not where it was recorded"
            tree_map(lambda place, made: place.copy_(made), places, result)

        return places, play


def _difference(was, now):
    return next(((a, b) for a, b in zip(was, now, strict=False) if a != b), (len(was), len(now)))
