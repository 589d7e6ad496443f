"""What the ranks have found in a comparison, put together: a row for each tensor, in the order of execution."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from minimegatron.comm.agree import gather_objects
from minimegatron.comm.mesh import Mesh
from minimegatron.training.comparison.distance import distance_of, where_of
from minimegatron.training.comparison.first_batch import Seen
from minimegatron.training.probe import Place

PASSES = ("forward", "recompute", "gradient", "parameter", "sum")


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one tensor is from the reference, over all microbatches and ranks.

    Attributes:
        phase: `forward`, `recompute`, `gradient`, `parameter`, or `sum` for a loss or the norm.
        name: the module, parameter or number.
        kind: class of the module, or "".
        distance: largest difference, in units of the tensor's largest element.
        limit: what is allowed.
        ranks: the ranks that are beyond it.
        note: microbatch, samples and place of the largest difference on the first of them.
    """

    phase: str
    name: str
    kind: str
    distance: float
    limit: float
    ranks: tuple[int, ...] = ()
    note: str = ""

    @property
    def bad(self) -> bool:
        return bool(self.ranks)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result, the same on every rank.

    Attributes:
        differences: of every tensor, in the order of execution.
        left_out: places that one side alone has, or of which the part is not known.
        coordinates: of each rank, e.g. `tp 1, pp 0`.
        what: what was compared with what.
    """

    differences: tuple[Difference, ...]
    left_out: tuple[str, ...]
    coordinates: tuple[str, ...]
    what: str

    @property
    def first(self) -> Difference | None:
        """The first tensor beyond its limit, in the order of execution."""
        return next((d for d in self.differences if d.bad), None)

    def before(self, one: Difference) -> Difference | None:
        """The tensor before another in the same pass."""
        earlier = [d for d in self.differences[: self.differences.index(one)] if d.phase == one.phase]
        return earlier[-1] if earlier else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
        first = self.first
        return {
            "what": self.what,
            "agree": first is None,
            "first": None if first is None else dataclasses.asdict(first),
            "differences": [dataclasses.asdict(d) for d in self.differences],
            "left_out": list(self.left_out),
            "coordinates": list(self.coordinates),
        }


@dataclasses.dataclass
class Found:
    """What this rank has found of a place, in all microbatches."""

    distance: float = 0.0
    limit: float = math.inf
    note: str = ""
    bad: bool = False
    compared: bool = False

    def add(self, distance: float, limit: float, note: Callable[[], str]) -> None:
        bad = not distance <= limit
        if not self.compared or (bad and not self.bad) or (bad == self.bad and distance > self.distance):
            self.distance, self.limit, self.note = distance, limit, note() if bad else ""
        self.bad, self.compared = self.bad or bad, True


Sums = list[tuple[str, str, float, float, bool, str]]  # phase, name, distance, limit, bad on this rank, note


def compare_recomputed(mine: Seen, order: dict[Place, str], found: dict[Place, Found]) -> None:
    """What the backward pass has computed again must be what the forward pass has computed, bit for bit."""
    for place, tensor in mine.tensors.items():
        before = mine.tensors.get(place._replace(phase="forward"))
        if place.phase == "recompute" and before is not None:
            order.setdefault(place.anywhere, type(mine.modules[place.module]).__name__)
            found.setdefault(place.anywhere, Found()).add(
                distance_of(tensor, before, 1e-300),
                0.0,
                lambda place=place, a=tensor, b=before: f"microbatch {place.microbatch}: {where_of(a, b)}",  # type: ignore[misc]
            )


def of_all_ranks(
    mesh: Mesh, order: dict[Place, str], found: dict[Place, Found], sums: Sums, left_out: set[str], what: str
) -> Comparison:
    """The findings of all ranks together."""
    everyone = gather_objects((found, sums, sorted(left_out), order), mesh.world)
    kinds: dict[Place, str] = {}
    for _, _, _, theirs in everyone:
        kinds |= {place: kind for place, kind in theirs.items() if place not in kinds}
    rows, alone = [], set[str]()
    for phase in PASSES[:3]:
        for place, kind in kinds.items():
            if place.phase != phase:
                continue
            by_rank = {r: f for r, (theirs, *_) in zip(mesh.world.ranks, everyone, strict=True)
                       if (f := theirs.get(place)) is not None and f.compared}  # fmt: skip
            if not by_rank:
                alone.add(f"{phase} {place}: on one side only")
                continue
            bad = {r: f for r, f in by_rank.items() if f.bad}
            worst = max((bad or by_rank).values(), key=lambda f: f.distance)
            note = next(iter(bad.values())).note if bad else ""
            rows.append(Difference(phase, str(place), kind, worst.distance, worst.limit, tuple(bad), note))
    for index, (phase, name, _, limit, _, _) in enumerate(sums):
        each = [theirs[index] for _, theirs, _, _ in everyone]
        wrong = tuple(r for r, row in zip(mesh.world.ranks, each, strict=True) if row[4])
        worst_row = max(each, key=lambda row: row[2])
        rows.append(Difference(phase, name, "", worst_row[2], limit, wrong, worst_row[5]))
    not_known = {line for _, _, lines, _ in everyone for line in lines}
    return Comparison(
        tuple(rows), tuple(sorted(not_known | alone)), tuple(gather_objects(coordinates(mesh), mesh.world)), what
    )


def coordinates(mesh: Mesh) -> str:
    """This rank's coordinates on the axes that have several ranks: `tp 1, pp 0`; etp only where it is not tp."""
    axes = [(name, mesh.axis(name)) for name in _axes(mesh)]
    return ", ".join(f"{name} {axis.rank}" for name, axis in axes if axis.size > 1)


def _axes(mesh: Mesh) -> list[str]:
    return ["tp", "cp", "dp", "pp", "ep"] + (["etp"] if mesh.etp.size != mesh.tp.size else [])


def describe(mesh: Mesh) -> str:
    """`4 ranks (tp2 pp2, sequence parallel)`."""
    sizes = [f"{n}{mesh.axis(n).size}" for n in _axes(mesh) if mesh.axis(n).size > 1]
    more = ", sequence parallel" if mesh.sequence_parallel else ""
    inside = f" ({' '.join(sizes)}{more})" if sizes else ""
    return f"{mesh.world.size} rank{'s'[: mesh.world.size > 1]}{inside}"
