"""Weights from a trainer's layout to an engine's, on the same ranks and in memory.

The problem in a sentence: reinforcement learning trains in one layout and generates in another, so after every step
each rank's engine needs parts of tensors that other ranks have just changed.

A file would cost the time of a disk, and an all-gather would need memory for whole tensors. Both sides are boxes of
logical tensors (`checkpoint/regions`), so each rank receives exactly the boxes that it wants, each from one rank that
holds it:

    once       every rank announces the boxes it holds and those it wants; all ranks derive the same plan
    each time  rounds: cut pieces out -> one all-to-all over all ranks -> copy them into the engine's weights

| trainer -> engine  | a rank of R receives, of n weights    | because                                    |
|--------------------|---------------------------------------|--------------------------------------------|
| tp -> the same tp  | nothing                               | a rank that holds what it wants copies it  |
| tp R -> R replicas | n (R-1)/R                             | each replica lacks what the others held    |
| pp R -> tp R       | n/R (R-1)/R                           | a rank wants 1/R, of every stage           |
| ZeRO-3 -> replicas | n (R-1)/R                             | as tp                                      |

A round has at most `ROUND` bytes to or from any rank, so it needs memory for two messages of that size. Weights travel
in the smaller of the two dtypes. Ranks that hold the same box share the sending.

The vocabulary's padding is in no box and stays zero. A tied weight has one name and is sent to every copy.

**Stale pages.** Cached keys and values were computed by the old weights. So the engine's version goes up
(`Engine.new_weights`): no old page is reused, running sequences are computed again, and each output names the version
that drew it.

Megatron-LM: `megatron/core/resharding/refit.py`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from minimegatron.checkpoint.regions import Box, Logical, Region, regions
from minimegatron.checkpoint.sources import blocks, elements, inside, intersection, slices
from minimegatron.comm.agree import gather_objects, on_all_ranks
from minimegatron.comm.collectives import all_to_all
from minimegatron.errors import ConfigError, did_you_mean
from minimegatron.inference.engine import Engine
from minimegatron.layers.param import layout_of, logical_parameters

ROUND = 1 << 26  # bytes


class Held(NamedTuple):
    """The boxes of a logical tensor that a rank holds, or wants."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class Piece(NamedTuple):
    """A box that one rank sends to another, or copies for itself.

    Attributes:
        name, box: of the logical tensor.
        source, target: ranks of the world.
        held, wanted: index of the region that contains the box, on the source's and the target's side.
    """

    name: str
    box: Box
    source: int
    target: int
    held: int
    wanted: int


class Round(NamedTuple):
    """Pieces of one all-to-all."""

    dtype: torch.dtype
    pieces: tuple[Piece, ...]


def weights_of(model: Any) -> dict[str, Logical]:
    """The parameters of a model by logical name, as views; the model's weights are not sharded."""
    weights: dict[str, Logical] = {}
    for name, param in logical_parameters(model):
        layout = layout_of(param)
        before = weights[name].parts if name in weights else ()
        parts = [*before, *regions(layout, param.detach())]
        weights[name] = Logical(layout.unpadded_shape, parts, param.dtype)
    return weights


class Refit:
    """Copies a trainer's weights into an engine, after every step if wanted. All ranks construct and call it.

    Args:
        trainer: this rank's regions of the weights by logical name; from `training/run_state.model_weights` for every
            layout and sharding, from `weights_of` for a model without a wrapper.
        engine: receives them; its model may be in any layout of the same ranks, replicas included.
        cast: convert where the engine has another dtype than the trainer, as `Tensor.to` does.

    Attributes:
        rounds: the plan, the same on every rank.
        casts: (from, to) -> number of tensors that are converted so.

    Raises:
        ConfigError: on all ranks alike: a tensor that one side lacks or has in another shape, a box that no rank holds,
            or another dtype without `cast`.
    """

    def __init__(self, trainer: Mapping[str, Logical], engine: Engine, *, cast: bool = False) -> None:
        self.engine, self.world = engine, engine.model.mesh.world
        self._wanted = weights_of(engine.model)
        self._mine = _described(trainer)
        both = gather_objects((self._mine, _described(self._wanted)), self.world)
        held, wanted = [mine for mine, _ in both], [mine for _, mine in both]
        kinds, target = _kinds(held), _kinds(wanted)
        _check_same(kinds, target)
        names = list(target)
        self.casts = collections.Counter(
            (kinds[name].dtype, target[name].dtype) for name in names if kinds[name].dtype != target[name].dtype
        )
        if self.casts and not cast:
            name = next(name for name in names if kinds[name].dtype != target[name].dtype)
            raise ConfigError(
                f"{name} is {kinds[name].dtype} in the trainer and {target[name].dtype} in the engine",
                where=f"{sum(self.casts.values())} of {len(names)} tensors have another dtype",
                fix="cast=True converts them, or build the engine's model with the trainer's params_dtype",
            )
        sent = [0] * self.world.size
        travels = {n: min(kinds[n].dtype, target[n].dtype, key=lambda dtype: dtype.itemsize) for n in names}
        pieces = [(travels[n], p) for n in names for p in _pieces(n, held, wanted, travels[n].itemsize, sent)]
        self.rounds = _rounds(pieces, self.world.size)

    @torch.no_grad()
    def __call__(self, trainer: Mapping[str, Logical]) -> int:
        """Copy the trainer's current weights; the engine must not compute meanwhile.

        Args:
            trainer: the same regions as at construction, with new values.

        Returns:
            The version of the engine's weights (`Engine.new_weights`).

        Raises:
            ConfigError: other regions than at construction.
            RankError: that happened on another rank.
            RuntimeError: another rank died, or did not come within the deadline of the process group.
        """
        on_all_ranks(lambda: self._check_planned(trainer), self.world)
        for dtype, pieces in self.rounds:
            self._play(dtype, pieces, trainer)
        return self.engine.new_weights()

    def _check_planned(self, trainer: Mapping[str, Logical]) -> None:
        now = _described(trainer)
        if now != self._mine:
            name = next(n for n in (*now, *self._mine) if now.get(n) != self._mine.get(n))
            raise ConfigError(
                f"{name} lies elsewhere than when the plan was made, or has another dtype",
                where=f"rank {self.world.ranks[self.world.rank]}",
                fix="a new Refit for a new layout",
            )

    def _play(self, dtype: torch.dtype, pieces: Sequence[Piece], trainer: Mapping[str, Logical]) -> None:
        me, size, device = self.world.rank, self.world.size, self.engine.model.mesh.device
        for piece in pieces:
            if piece.source == piece.target == me:
                self._place(piece).copy_(_cut(trainer[piece.name].parts[piece.held], piece.box))
        if all(piece.source == piece.target for piece in pieces):
            return  # on every rank
        sends = sorted((p for p in pieces if p.source == me != p.target), key=lambda p: p.target)
        takes = sorted((p for p in pieces if p.target == me != p.source), key=lambda p: p.source)
        row = torch.empty(sum(elements(p.box) for p in sends), dtype=dtype, device=device)
        for piece, place in zip(sends, row.split([elements(p.box) for p in sends]), strict=True):
            cut = _cut(trainer[piece.name].parts[piece.held], piece.box)
            place.view(cut.shape).copy_(cut)
        came = all_to_all(
            row,
            self.world,
            [sum(elements(p.box) for p in takes if p.source == rank) for rank in range(size)],
            [sum(elements(p.box) for p in sends if p.target == rank) for rank in range(size)],
        )
        for piece, numbers in zip(takes, came.split([elements(p.box) for p in takes]), strict=True):
            place = self._place(piece)
            place.copy_(numbers.view(place.shape))

    def _place(self, piece: Piece) -> torch.Tensor:
        """The view of this rank's weights that a piece is copied into."""
        return _cut(self._wanted[piece.name].parts[piece.wanted], piece.box)


def _cut(region: Region, box: Box) -> torch.Tensor:
    return region.data.detach()[slices(inside(box, region.box))]


def _described(tensors: Mapping[str, Logical]) -> dict[str, Held]:
    return {n: Held(t.dtype, tuple(t.shape), tuple(tuple(p.box) for p in t.parts)) for n, t in tensors.items()}


def _kinds(ranks: Sequence[Mapping[str, Held]]) -> dict[str, Held]:
    """Dtype and shape of every tensor of any rank."""
    return {name: held for rank in reversed(ranks) for name, held in rank.items()}


def _check_same(trainer: Mapping[str, Held], engine: Mapping[str, Held]) -> None:
    problems = [
        f"{name}: the engine wants it, and the trainer lacks it {did_you_mean(name, trainer)}".rstrip()
        for name in engine.keys() - trainer.keys()
    ]
    problems += [f"{name}: the trainer has it, and the engine lacks it" for name in trainer.keys() - engine.keys()]
    problems += [
        f"{name}: {list(trainer[name].shape)} in the trainer, {list(held.shape)} in the engine"
        for name, held in engine.items()
        if name in trainer and trainer[name].shape != held.shape
    ]
    if problems:
        shown = [*sorted(problems)[:8], *([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])]
        raise ConfigError(
            "the trainer's weights are not the engine's:\n  " + "\n  ".join(shown),
            fix="the same model on both sides; hand over no tensor that the engine does not have",
        )


def _pieces(
    name: str,
    held: Sequence[Mapping[str, Held]],
    wanted: Sequence[Mapping[str, Held]],
    itemsize: int,
    sent: list[int],
) -> Iterator[Piece]:
    """The pieces of a tensor that cover what ranks want, each from the rank itself, or the holder that sends least.

    Args:
        sent: bytes that each rank sends so far; updated.
    """
    holders: dict[Box, dict[int, int]] = {}  # box -> rank -> number of the region
    for rank, tensors in enumerate(held):
        for i, box in enumerate(tensors[name].boxes if name in tensors else ()):
            holders.setdefault(box, {}).setdefault(rank, i)
    for target, tensors in enumerate(wanted):
        for number, box in enumerate(tensors[name].boxes if name in tensors else ()):
            missing = [box]
            for source_box, ranks in sorted(holders.items(), key=lambda item: target not in item[1]):
                left: list[Box] = []
                for part in missing:
                    common = intersection(part, source_box)
                    if common is None:
                        left.append(part)
                        continue
                    left += _rest(part, common)
                    source = target if target in ranks else min(ranks, key=sent.__getitem__)
                    for block in blocks(common, itemsize) if common else [[]]:
                        if source != target:
                            sent[source] += elements(block) * itemsize
                        yield Piece(name, tuple(block), source, target, ranks[source], number)
                missing = left
            if missing:
                raise ConfigError(
                    f"no rank holds {name} at {list(missing[0])}, which rank {target} wants",
                    fix="hand over the regions of all ranks, those of every stage and shard among them",
                )


def _rest(box: Box, hole: Sequence[tuple[int, int]]) -> list[Box]:
    """A box minus a box inside it, as boxes."""
    left, inner = [], list(box)
    for dim, (start, stop) in enumerate(hole):
        for part in ((inner[dim][0], start), (stop, inner[dim][1])):
            if part[0] < part[1]:
                left.append((*inner[:dim], part, *inner[dim + 1 :]))
        inner[dim] = (start, stop)
    return left


def _rounds(pieces: Sequence[tuple[torch.dtype, Piece]], size: int) -> list[Round]:
    """Group pieces into rounds of one dtype and at most `ROUND` bytes to or from a rank (more if one piece has)."""
    rounds: list[Round] = []
    for dtype in dict.fromkeys(dtype for dtype, _ in pieces):
        together: list[Piece] = []
        out, into = [0] * size, [0] * size
        for piece in (piece for of, piece in pieces if of == dtype):
            nbytes = 0 if piece.source == piece.target else elements(piece.box) * dtype.itemsize
            if together and max(out[piece.source], into[piece.target]) + nbytes > ROUND:
                rounds.append(Round(dtype, tuple(together)))
                together, out, into = [], [0] * size, [0] * size
            together.append(piece)
            out[piece.source] += nbytes
            into[piece.target] += nbytes
        rounds.append(Round(dtype, tuple(together)))
    return rounds
