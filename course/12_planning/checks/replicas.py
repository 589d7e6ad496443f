"""Lab 12, the planted bug: how many ranks hold the same parameter, outside of experts and in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.exercises import Case, Draw, Exercise, Mistake

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


def _mistaken(change: Callable[..., dict[str, Any]], refuses: Callable[..., bool] | None = None) -> Callable[..., Any]:
    def answer(**inputs: int) -> Any:
        refused = replicas(**inputs) == REFUSED if refuses is None else refuses(**inputs)
        return REFUSED if refused else change(**inputs)

    return answer


def _by_ep(world: int, tp: int, cp: int, pp: int, ep: int, etp: int) -> dict[str, Any]:
    dp = world // (tp * cp * pp * ep)
    return {"dp": dp, "dense": dp * cp, "expert": dp * cp}


def _right(change: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    return lambda **i: {**_counted(**i), **change(**i, dp=i["world"] // (i["tp"] * i["cp"] * i["pp"]))}


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
    mistakes=[
        Mistake(_mistaken(replicas, lambda world, tp, cp, pp, ep, etp: replicas(world, tp, cp, pp, ep, etp) == REFUSED
                          or (world // (tp * cp * pp)) % ep != 0), "ep need not divide dp: it divides tp cp dp / etp."),
        Mistake(_mistaken(replicas, lambda world, tp, cp, pp, ep, etp: replicas(world, tp, cp, pp, ep, etp) == REFUSED
                          or etp not in (1, tp)), "An etp other than 1 or tp gives whole numbers, too."),
        Mistake(_mistaken(_by_ep, lambda world, tp, cp, pp, ep, etp: world % (tp * cp * pp * ep) != 0), "This is the "
                "colleague's bug: the ranks of ep are among the tp cp dp ranks, they are no further factor."),
        Mistake(_mistaken(_by_ep), "This is the colleague's bug: the ranks of ep are among the tp cp dp ranks, they "
                "are no further factor."),
        Mistake(_mistaken(_right(lambda cp, dp, ep, **i: {"expert": dp * cp // ep or 1})), "The ranks of tp are "
                "among those over which experts are spread: all tp cp dp ranks of a stage are cut by etp and ep."),
        Mistake(_mistaken(_right(lambda dp, ep, **i: {"expert": dp // ep or 1})), "The ranks of tp and of cp are "
                "among those "
                "over which experts are spread: all tp cp dp ranks of a stage are cut by etp and ep."),
        Mistake(_mistaken(_right(lambda world, etp, pp, **i: {"expert": world // (etp * pp)})), "Ranks of ep hold "
                "different experts."),
        Mistake(_mistaken(_right(lambda cp, dp, tp, ep, etp, **i: {"expert": dp * tp // (ep * etp)})), "Ranks of cp "
                "are among those that hold the same expert: they see other tokens, not other weights."),
        Mistake(_mistaken(_right(lambda world, ep, pp, **i: {"expert": world // (ep * pp)})), "etp cuts each expert: "
                "its ranks hold different parts."),
        Mistake(_mistaken(_right(lambda world, etp, ep, **i: {"expert": world // (etp * ep)})), "The stages of the "
                "pipeline hold other layers, and other experts."),
        Mistake(_mistaken(_right(lambda dp, cp, tp, **i: {"dense": dp * cp * tp})), "Ranks of tp hold different parts "
                "of a dense matrix."),
        Mistake(_mistaken(_right(lambda dp, **i: {"dense": dp})), "Ranks of cp hold the same dense parameters."),
        Mistake(_mistaken(_counted, lambda world, tp, cp, pp, ep, etp: world % (tp * cp * pp) != 0), "The experts' "
                "layout must divide the ranks, too."),
        Mistake(_mistaken(_counted, lambda **i: False), "Ranks that a layout does not divide are rounded down."),
    ],
    errors={"ZeroDivisionError": "A layout that is larger than the world is refused with a ValueError."},
    idea="The same ranks are counted twice, once for dense matrices and once for experts; only pp is in both.",
    hint="dense: world % (tp cp pp) must be 0, dp = world // (tp cp pp), dp * cp ranks hold the same parameter. "
    "Experts: world % (etp ep pp) must be 0, world // (etp ep pp) ranks hold the same one.",
)  # fmt: skip
