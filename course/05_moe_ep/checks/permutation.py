"""Lab 05: tokens as rows, sorted by expert, and back."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

from .routing import top


def _drive_permute(exercise: Any, tokens: Any, probs: Any, map: Any, y: Any) -> dict[str, Any]:
    for given in (tokens, probs, y):
        given.requires_grad_()
    rows, weights, source = exercise.permute(tokens, probs, map)
    said, places = [len(one) for one in (rows, weights, source)], int(map.sum())
    if said != [places] * 3:
        of_probs = ": `map` says where a token goes, `probs` does not" if said[0] == int((probs != 0).sum()) else ""
        raise ValueError(f"{said[0]} rows, {said[1]} weights, {said[2]} sources for {places} places in map{of_probs}")
    ((rows * rows.detach()).sum() + (weights * (1 + weights.detach())).sum()).backward()
    back = exercise.unpermute(y, source, len(tokens))
    (back * back.detach()).sum().backward()
    return {
        "rows": rows.detach(), "weights": weights.detach(), "source": source, "back": back.detach(),
        "gradient of tokens": tokens.grad, "gradient of probs": probs.grad, "gradient of what comes back": y.grad,
    }  # fmt: skip


def _permuted(tokens: torch.Tensor, probs: torch.Tensor, map: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    pairs = [(t, e) for e in range(map.shape[1]) for t in range(len(map)) if map[t, e]]
    source = torch.tensor([t for t, _ in pairs], dtype=torch.int64)
    back = torch.stack([y[source == t].sum(0) for t in range(len(tokens))])
    return {
        "rows": tokens[source], "weights": torch.stack([probs[t, e] for t, e in pairs]), "source": source,
        "back": back, "gradient of tokens": tokens * map.sum(1, keepdim=True),
        "gradient of probs": (1 + probs) * map, "gradient of what comes back": back[source],
    }  # fmt: skip


def _some_map(draw: Draw, k: int = 2) -> dict[str, Any]:
    t, e, h = draw.integer(4, 9), draw.integer(3, 6), draw.integer(2, 5)
    return _with_map(draw, top(draw.tensor(t, e), k or e), h)


def _with_map(draw: Draw, chosen: torch.Tensor, h: int) -> dict[str, Any]:
    t, e = chosen.shape
    probs = draw.tensor(t, e).abs() * chosen
    return {"tokens": draw.tensor(t, h), "probs": probs, "map": chosen, "y": draw.tensor(int(chosen.sum()), h)}


def _quiet(draw: Draw) -> dict[str, Any]:
    """Draw an expert without tokens, and a token that was dropped by all experts."""
    chosen = _some_map(draw)["map"]
    chosen[:, draw.integer(0, chosen.shape[1] - 1)] = False
    chosen[draw.integer(0, len(chosen) - 1)] = False
    return _with_map(draw, chosen, draw.integer(2, 5))


def _quiet_ends(draw: Draw) -> dict[str, Any]:
    """Draw inputs in which the first and the last expert have no tokens, and the first and the last token no expert."""
    chosen = torch.zeros(7, 5, dtype=torch.bool)
    chosen[1:-1, 1:-1] = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0], [0, 0, 1]], dtype=torch.bool)
    return _with_map(draw, chosen, 3)


def _weight_of_nothing(draw: Draw) -> dict[str, Any]:
    """Draw a weight that is 0; its row is sent all the same."""
    inputs = _some_map(draw)
    places = inputs["map"].nonzero()[::3]
    inputs["probs"][places[:, 0], places[:, 1]] = 0.0
    return inputs


def _in_double(draw: Draw) -> dict[str, Any]:
    """Draw inputs in float64: rows have the dtype of the tokens."""
    inputs = _some_map(draw)
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


_SMALL = {
    "tokens": torch.tensor([[1.0], [2.0], [3.0]]),
    "probs": torch.tensor([[0.25, 0.75], [0.0, 1.0], [1.0, 0.0]]),
    "map": torch.tensor([[True, True], [False, True], [True, False]]),
    "y": torch.tensor([[10.0], [20.0], [30.0], [40.0]]),
}

PERMUTE = Exercise(
    "permute",
    reference=_permuted,
    drive=_drive_permute,
    cases=[
        Case("three tokens a, b, c and two experts, as in the text", _SMALL),
        Case("other sizes", _some_map, points=2, hidden=True, draws=3, fixed=[
            partial(_some_map, k=3), partial(_some_map, k=1), _weight_of_nothing, _in_double]),
        Case("every token to every expert", partial(_some_map, k=0), hidden=True),
        Case("an expert without tokens, a token without experts", _quiet, hidden=True, fixed=[_quiet_ends]),
    ],
    errors={
        "is invalid for input of size": "This takes as many rows for granted as tokens times k. A token may have more "
        "or fewer than others, or none.",
        "does not require grad": "A result is cut off from what it was made of: rows and weights need a gradient, and "
        "what comes back, too.",
        "`probs` does not": "A weight may be 0, and the row travels all the same: `map` says where a token goes.",
    },
    idea="A row is a pair (expert, token): list the pairs in the right order, and both ways follow from the list.",
    hint="map.T.nonzero() lists the pairs (expert, token) in the right order. rows = tokens[source]; "
    "weights = probs.T[map.T]; back: index_add into zeros.",
)  # fmt: skip
