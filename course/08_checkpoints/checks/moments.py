"""Lab 08, the planted bug: which parameter's moments an optimizer was given, and moments that are found by name."""

from __future__ import annotations

from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

Tensors = dict[str, torch.Tensor]


def whose(saved: Tensors, restored: Tensors) -> dict[str, str | None]:
    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        return one.shape == other.shape and bool((one == other).all())

    return {
        name: next((source for source in (name, *saved) if source in saved and same(saved[source], tensor)), None)
        for name, tensor in restored.items()
    }


_NAMES = ("embed", "norm", "q", "k", "v", "out", "fc1", "fc2")


def _moments(draw: Draw) -> Tensors:
    """Draw moments: some have equal shapes, two have the same numbers in another order, two are nearly the same."""
    side = draw.integer(2, 4)
    found = {name: draw.tensor(side, side).square() for name in _NAMES}
    found["norm"] = draw.tensor(side).square()
    found["k"] = found["q"].flip(0)
    found["v"] = found["out"] * (1 + 1e-6)
    found["fc1"] = draw.tensor(side, side + 1).square()
    return found


def _moved(draw: Draw) -> dict[str, Any]:
    saved = _moments(draw)
    names = list(saved)
    draw.random.shuffle(names)
    restored = {name: saved[source].clone() for name, source in zip(saved, names, strict=True)}
    lost = draw.choice(names)
    restored[lost] = draw.tensor(*restored[lost].shape)
    return {"saved": saved, "restored": restored}


def _in_order(draw: Draw) -> dict[str, Any]:
    """Draw a right state with names in another order; two moments are equal, which is no mix-up."""
    saved = _moments(draw)
    saved["fc2"] = saved["embed"].clone()
    return {"saved": saved, "restored": {name: saved[name].clone() for name in reversed(saved)}}


def _equal_ones(draw: Draw) -> dict[str, Any]:
    """Draw two equal moments, of which the first is to be named; transposed, reshaped and shorter ones are
    different."""
    saved = _moments(draw)
    saved["fc2"] = saved["embed"].clone()
    restored = {"v": saved["embed"].clone(), "q": saved["q"].mT.clone(), "fc1": saved["fc1"].mT.clone(),
                "norm": saved["norm"][:1].clone(), "new": saved["norm"].clone(),
                "k": saved["k"] * (1 + 1e-6), "flat": saved["embed"].flatten()}  # fmt: skip
    return {"saved": saved, "restored": restored}


_PAIR = {
    "saved": {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([2.0, 1.0]), "c": torch.tensor([5.0])},
    "restored": {"a": torch.tensor([2.0, 1.0]), "b": torch.tensor([2.0, 1.0]), "c": torch.tensor([4.0])},
}


WHOSE = Exercise(
    "whose",
    reference=whose,
    cases=[
        Case("a has been given b's, b its own, c what was never saved", _PAIR),
        Case("other tables", _moved, points=2, hidden=True, fixed=[_in_order, _equal_ones]),
    ],
    errors={
        "KeyError": "A name of `restored` need not be in `saved`.",
        "must match": "Tensors of other shapes cannot be compared number by number: they are others.",
    },
    idea="Which numbers of a parameter's averages could not be those of another one?",
    hint="For each name of restored: its own first, then every name of saved; the first with the same shape and "
    "torch.equal is the answer, else None.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------- by name


def by_name(state: dict[int, Any], saved_names: list[str], names: list[str], refused: str = "") -> Any:
    if refused:
        return "refused"
    table = {name: state[i] for i, name in enumerate(saved_names) if i in state}
    return {i: table[name] for i, name in enumerate(names) if name in table}


def _drive(exercise: Any, state: Any, saved_names: Any, names: Any, refused: str) -> Any:
    """Run the learner's function. `refused` is the name that its `ValueError` must contain, "" where it must not
    raise."""
    try:
        return exercise.by_name(state, saved_names, names)
    except ValueError as error:
        if not refused:
            raise
        return "refused" if refused in str(error) else f"a ValueError that does not name {refused}"


def _one(value: float, step: int = 1) -> dict[str, Any]:
    return {"step": step, "exp_avg": torch.tensor([value]), "exp_avg_sq": torch.tensor([value * value])}


def _states(draw: Draw, there: list[int], size: int = 2) -> dict[int, Any]:
    return {i: {"step": draw.integer(1, 9), "exp_avg": draw.tensor(size), "exp_avg_sq": draw.tensor(size).square()}
            for i in there}  # fmt: skip


def _orders(draw: Draw) -> dict[str, Any]:
    names = list(_NAMES)
    draw.random.shuffle(names)
    there = sorted(draw.random.sample(range(8), 6))
    return {"state": _states(draw, there), "saved_names": list(_NAMES), "names": names, "refused": ""}


def _grown(draw: Draw) -> dict[str, Any]:
    """Draw new parameters, at the front and in the middle, which have no state yet."""
    names = ["adapter", *_NAMES[:3], "gate", *_NAMES[:2:-1]]
    return {"state": _states(draw, list(range(8))), "saved_names": list(_NAMES), "names": names, "refused": ""}


def _empty(draw: Draw) -> dict[str, Any]:
    """Draw an optimizer that has made no step."""
    return {"state": {}, "saved_names": list(_NAMES), "names": list(reversed(_NAMES)), "refused": ""}


def _stateless_one_gone(draw: Draw) -> dict[str, Any]:
    """Draw a removed parameter that never had a state, so nothing is lost."""
    return {"state": _states(draw, [0, 2]), "saved_names": ["a", "b", "c"], "names": ["c", "a"], "refused": ""}


def _gone(draw: Draw) -> dict[str, Any]:
    """Draw a state whose parameter was removed, the last or the first."""
    there, gone = draw.choice([
        (["fc1", "embed"], "fc2"), (["fc2", "fc1"], "embed"), (["fc2", "fc1", "new"], "embed"),
    ])  # fmt: skip
    return {"state": _states(draw, [0, 1, 2]), "saved_names": ["embed", "fc1", "fc2"], "names": there, "refused": gone}


_SWAPPED = {"state": {0: _one(1.0), 1: _one(2.0)}, "saved_names": ["q", "k"], "names": ["k", "q"], "refused": ""}
_LOST = {"state": {0: _one(1.0), 1: _one(2.0)}, "saved_names": ["q_proj", "k_proj"], "names": ["k_proj", "v_proj"],
         "refused": "q_proj"}  # fmt: skip


BY_NAME = Exercise(
    "by_name",
    reference=by_name,
    drive=_drive,
    rtol=0.0,
    atol=0.0,
    cases=[
        Case("q, k were saved; the new order is k, q", _SWAPPED),
        Case("other orders, parameters without a state, new ones", _orders, points=2, hidden=True, draws=2, fixed=[
            _grown, _empty, _stateless_one_gone]),
        Case("averages whose parameter is gone are refused with a ValueError that names it", _gone, hidden=True,
             fixed=[_LOST]),
    ],
    errors={"ValueError": "A ValueError, though no averages are lost here: their parameters are all in `names`."},
    idea="A number is a place in one order. What do both orders know a parameter by?",
    hint="table = {saved_names[i]: one for i, one in state.items()}; raise ValueError if a name of it is not in names; "
    "return {i: table[name] for i, name in enumerate(names) if name in table}.",
)  # fmt: skip
