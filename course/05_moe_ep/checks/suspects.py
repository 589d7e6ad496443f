"""Lab 05: gradients compared with those of the twin."""

from __future__ import annotations

import math
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise


def _drive_suspects(exercise: Any, got: Any, want: Any) -> Any:
    found = exercise.suspects(got, want)
    return {f"`{name}`": factor for name, factor in found.items()} if isinstance(found, dict) else found


def suspects(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """{name in backticks, as the drive writes it, so that its end can be seen: factor}."""
    found = {}
    for name, right in want.items():
        g, w = got[name].double(), right.double()
        if (g - w).norm() <= 1e-3 * w.norm():
            continue
        factor = (g * w).sum() / (w * w).sum()
        found[f"`{name}`"] = factor.item() if (g - factor * w).norm() <= 1e-3 * (factor * w).norm() else math.nan
    return found


def _pairs(draw: Draw) -> dict[str, Any]:
    want = {f"layer.{i}.{part}": draw.tensor(3, 4) for i in range(3) for part in ("router", "fc1", "fc2")}
    got = {name: g * (1 + 1e-6 * draw.tensor(3, 4)) for name, g in want.items()}
    names = draw.random.sample(list(want), 5)
    for name, factor in zip(names, (2.0, 0.25, -1.0, 0.0), strict=False):
        got[name] = factor * got[name]
    got[names[4]] = draw.tensor(3, 4)
    return {"got": got, "want": want}


def _never_used(draw: Draw) -> dict[str, Any]:
    """Draw an expert without tokens, whose gradient is rightly 0, and a small gradient that is right as well."""
    small = 1e-6 * draw.tensor(5)
    want = {"idle": torch.zeros(4), "small": small, "large": draw.tensor(4)}
    return {"got": {"idle": torch.zeros(4), "small": 3 * small, "large": want["large"].clone()}, "want": want}


_MANY = torch.tensor([1.0] + [0.0] * 400)
_A_LITTLE_EVERYWHERE = torch.full((401,), 2e-4)  # |x| is 4e-3

_BEYOND = {
    "want": {"a number too many": torch.ones(4), "too large": torch.ones(4), "a little everywhere": _MANY,
             "twice, and a little everywhere": _MANY, "right": torch.ones(2)},
    "got": {"a number too many": torch.tensor([1.0, math.nan, 1.0, 1.0]), "too large": torch.full((4,), math.inf),
            "a little everywhere": _MANY + _A_LITTLE_EVERYWHERE, "right": torch.ones(2),
            "twice, and a little everywhere": 2 * _MANY + _A_LITTLE_EVERYWHERE},
}  # fmt: skip

_AWKWARD = {
    "want": {
        "zeros in it": torch.tensor([[1.0, 0.0], [0.0, 2.0]]), "sums to nothing": torch.tensor([1.0, -1.0, 2.0, -2.0]),
        "off in one": torch.tensor([1.0, 0.0, 0.0]), "nearly": torch.tensor([3.0, 4.0]),
        "nearly right": torch.tensor([1.0, 0.0]), "nothing wanted": torch.zeros(3), "twice": torch.tensor([1e-4, 2e-4]),
        "begins with 0": torch.tensor([0.0, 1.0]),
        "a little off": torch.tensor([0.0, 2.0]),
        "tiny, in another direction": torch.tensor([1e-4, 2e-4]),
        "large, nearly three times": torch.tensor([100.0, 0.0]),
        "large, hardly three times": torch.tensor([100.0, 0.0]),
        "first is right": torch.tensor([1.0, 1.0, 1.0]), "a sign": torch.tensor([1.0, 2.0]),
        "a hundredth": torch.tensor([1.0, 0.0]), "hardly a hundredth": torch.tensor([1.0, 0.0]),
    },
    "got": {
        "zeros in it": torch.tensor([[3.0, 0.0], [0.0, 6.0]]), "sums to nothing": torch.tensor([0.5, -0.5, 1.0, -1.0]),
        "off in one": torch.tensor([1.0, 0.0, 0.5]), "nearly": torch.tensor([3.0, 4.0]) * 1.004,
        "nearly right": torch.tensor([1.0, 5e-4]), "nothing wanted": torch.ones(3), "twice": torch.tensor([2e-4, 4e-4]),
        "begins with 0": torch.tensor([0.0, 3.0]),
        "a little off": torch.tensor([0.0, 2.003]),
        "tiny, in another direction": torch.tensor([2e-4, -1e-4]),
        "large, nearly three times": torch.tensor([300.0, 0.2]),
        "large, hardly three times": torch.tensor([300.0, 0.45]),
        "first is right": torch.tensor([1.0, 2.0, 2.0]), "a sign": torch.tensor([-1.0, -2.0]),
        "a hundredth": torch.tensor([0.01, 0.9e-5]), "hardly a hundredth": torch.tensor([0.01, 1.1e-5]),
    },
}  # fmt: skip


_NAMED = {
    "want": {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, -1.0]), "c": torch.tensor([3.0, 0.0])},
    "got": {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.5, -0.5]), "c": torch.tensor([0.0, 3.0])},
}


SUSPECTS = Exercise(
    "suspects",
    reference=suspects,
    drive=_drive_suspects,
    rtol=1e-2,
    cases=[
        Case("one right, one half as large, one of another direction", _NAMED),
        Case("nine gradients", _pairs, points=2, hidden=True, fixed=[_AWKWARD, _BEYOND]),
        Case("gradients of zero, and tiny ones", _never_used, hidden=True),
    ],
    idea="If got is a multiple of want at all, which multiple comes nearest to it? Then look at what is left.",
    hint="For each name: right if |got - want| <= 1e-3 |want|. Else factor = (got . want)/(want . want); if "
    "|got - factor want| is not small beside |factor want| it is no factor: nan.",
)  # fmt: skip
