"""Lab 08, the planted bug: which parameter's moments an optimizer was given, and moments that are found by name."""

from __future__ import annotations

from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise, Mistake

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


def _by(alike: Any) -> Any:
    """Return a search for the first moment with `alike(saved, restored)`."""
    return lambda saved, restored: {
        name: next((s for s in (name, *saved) if s in saved and alike(saved[s], tensor)), None)
        for name, tensor in restored.items()
    }


def _sums(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(torch.isclose(one.sum(), other.sum()))


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other)


def _each_once(saved: Tensors, restored: Tensors) -> dict[str, str | None]:
    """A mistake: a name that was found is not considered again."""
    free, found = dict(saved), dict[str, str | None]()
    for name, tensor in restored.items():
        source = found[name] = whose(free, {name: tensor})[name]
        if source is not None:
            del free[source]
    return found


WHOSE = Exercise(
    "whose",
    reference=whose,
    cases=[
        Case("a has been given b's, b its own, c what was never saved", _PAIR),
        Case("other tables", _moved, points=2, hidden=True, fixed=[_in_order, _equal_ones]),
    ],
    mistakes=[
        Mistake(_by(lambda one, other: one.shape == other.shape), "Equal shapes are no proof: half of the parameters "
                "of a layer have the same one."),
        Mistake(_by(_sums), "Sums and norms are the same for other numbers, or the same in another order."),
        Mistake(_by(_near), "Near is not the same: what was saved and read again is equal in every bit."),
        Mistake(_by(lambda one, other: torch.equal(one.flatten(), other.flatten())), "The same numbers in another "
                "shape are another tensor."),
        Mistake(_each_once, "Several parameters may have been given the averages of the same one."),
        Mistake(lambda saved, restored: whose(restored, saved), "The other way round: asked is, of each name of "
                "`restored`, where its numbers come from."),
        Mistake(lambda saved, restored: {name: found if found in (None, name) else whose(dict(reversed(saved.items())),
                {name: restored[name]})[name] for name, found in whose(saved, restored).items()}, "Of several that are "
                "equal, the first in the order of `saved` is named; here it is the last."),
        Mistake(lambda saved, restored: {name: None if found == name else found for name, found in whose(
            saved, restored).items()}, "A parameter that has its own is named too, with its own name."),
        Mistake(lambda saved, restored: {name: name if found is None else found for name, found in whose(
            saved, restored).items()}, "What was never saved belongs to no parameter: None."),
        Mistake(lambda saved, restored: {name: next((s for s in saved if saved[s].shape == tensor.shape and bool(
            (saved[s] == tensor).all())), None) for name, tensor in restored.items()}, "Where several are equal, its "
            "own comes first: that is no mix-up."),
        Mistake(lambda saved, restored: {found: name for name, found in whose(saved, restored).items()}, "The other "
                "way round: the key is the parameter that was given them."),
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


def by_name(
    state: dict[int, Any], saved_names: list[str], names: list[str], refused: str = "", *, position: bool = False,
) -> Any:  # fmt: skip
    """The state by parameter; with `position` a mistake."""
    if refused:
        return "refused"
    if position:
        return {i: state[i] for i in range(len(names)) if i in state}
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


def _sorted_names(state: dict[int, Any], saved_names: list[str], names: list[str], refused: str) -> Any:
    return by_name(state, sorted(saved_names), sorted(names))


def _dense(state: dict[int, Any], saved_names: list[str], names: list[str], refused: str) -> Any:
    """A mistake: states are numbered without the parameters that have none."""
    return dict(enumerate(by_name(state, saved_names, names).values()))


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
    mistakes=[
        Mistake(lambda state, saved_names, names, refused: by_name(state, saved_names, names, position=True),
                "That is by position: the first state goes to the first parameter, whatever its name."),
        Mistake(_sorted_names, "Sorting the names gives a position again, and only where both have the same names."),
        Mistake(lambda state, saved_names, names, refused: by_name(state, names, saved_names), "The other way round: "
                "the numbers of the answer are places in the new order."),
        Mistake(lambda state, saved_names, names, refused: by_name(state, saved_names, names), "Averages "
                "whose parameter is gone are dropped without a message. Refuse them, by the parameter's name."),
        Mistake(lambda state, saved_names, names, refused: {name: state[i] for i, name in enumerate(saved_names)
                if i in state}, "The optimizer knows its parameters by number: the keys are places, not names."),
        Mistake(lambda state, saved_names, names, refused: {i: {} for i in range(len(names))} | by_name(
                state, saved_names, names, refused) if not refused else "refused", "A parameter that has no averages "
                "has no entry, not an empty one."),
        Mistake(lambda state, saved_names, names, refused: f"a ValueError that does not name {refused}" if refused
                else by_name(state, saved_names, names), "It is refused, but the text of the ValueError does not have "
                "the name of the parameter."),
        Mistake(_dense, "A parameter that has no averages keeps its number; those after it do not move up."),
    ],
    errors={"ValueError": "A ValueError, though no averages are lost here: their parameters are all in `names`."},
    idea="A number is a place in one order. What do both orders know a parameter by?",
    hint="table = {saved_names[i]: one for i, one in state.items()}; raise ValueError if a name of it is not in names; "
    "return {i: table[name] for i, name in enumerate(names) if name in table}.",
)  # fmt: skip
