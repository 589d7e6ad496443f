"""Lab 12, the planted bug: how many ranks hold the same parameter, outside of experts and in them."""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise

REFUSED = "a ValueError"


def _counted(world: int, tp: int, cp: int, pp: int, ep: int, etp: int) -> dict[str, Any]:
    """The counts, rounded down, for any layout."""
    dp = world // (tp * cp * pp)
    return {"dp": dp, "dense": dp * cp, "expert": world // (etp * ep * pp)}


def replicas(world: int, tp: int, cp: int, pp: int, ep: int, etp: int) -> Any:
    """The counts, or the name of the error."""
    if world % (tp * cp * pp) or world % (etp * ep * pp):
        return REFUSED
    return _counted(world, tp, cp, pp, ep, etp)


def _drive(exercise: Any, world: Any, tp: Any, cp: Any, pp: Any, ep: Any, etp: Any) -> Any:
    try:
        return exercise.replicas(world, tp, cp, pp, ep, etp)
    except ValueError:
        return "a ValueError"


def _at(world: int, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1) -> dict[str, Any]:
    return {"world": world, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}


def _some(draw: Draw, fits: bool = True) -> dict[str, Any]:
    while True:
        tp, cp, pp, ep = (draw.choice([1, 2, 3, 4, 8]) for _ in range(4))
        world = tp * cp * pp * draw.choice([1, 2, 3, 4, 6, 8])
        found = _at(world if fits else world + draw.choice([0, 1, pp]), tp, cp, pp, ep, draw.choice([1, 2, tp]))
        if (replicas(**found) != REFUSED) == fits:
            return found


REPLICAS = Exercise(
    "replicas",
    reference=replicas,
    drive=_drive,
    cases=[
        Case("16 ranks, tp 2, ep 4", _at(16, 2, ep=4)),
        Case("16 ranks, cp 2, pp 2, ep 2", _at(16, cp=2, pp=2, ep=2)),
        Case("8 ranks, tp 2, ep 3: refused with a ValueError", _at(8, 2, ep=3)),
        Case("other layouts", _some, hidden=True, fixed=[
            _at(64, 4, 2, 2, 8, 4), _at(64, 4, 2, 2, 8, 1), _at(24, 3, 1, 2, 4, 1), _at(8, 8, ep=8), _at(8, ep=8),
            _at(12, cp=3, ep=2), _at(64, 4, 2, 2, 4, 2), _at(8, ep=2, etp=2), _at(1), _at(16, 4, 4, 1, 16, 1)]),
        Case("layouts that do not divide the ranks are refused", lambda draw: _some(draw, False), hidden=True, fixed=[
            _at(12, 2, 2, 2), _at(16, 2, ep=3), _at(8, ep=16), _at(8, 16), _at(24, 2, 1, 2, 8, 2), _at(6, 4, ep=2),
            _at(12, 2, ep=4, etp=2), _at(12, pp=2, ep=4)]),
    ],
    errors={"ZeroDivisionError": "A layout that is larger than the world is refused with a ValueError."},
    idea="The same ranks are counted twice, once for dense matrices and once for experts; only pp is in both.",
    hint="dense: world % (tp cp pp) must be 0, dp = world // (tp cp pp), dp * cp ranks hold the same parameter. "
    "Experts: world % (etp ep pp) must be 0, world // (etp ep pp) ranks hold the same one.",
)  # fmt: skip
