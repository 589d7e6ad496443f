"""Lab 10, the planted bugs: from tokens and log-probabilities to the part of the engine that is wrong."""

from __future__ import annotations

import itertools
from typing import Any

from labkit.exercises import Case, Draw, Exercise

Answer = dict[str, list[Any]]
NEAR = 1e-3


def diagnose(served: Answer, alone: Answer, scored: list[float]) -> list[Any]:
    for i, (token, value) in enumerate(zip(served["tokens"], served["log_probs"], strict=True)):
        if abs(value - scored[i]) > NEAR:
            return ["memory", i]
        if token != alone["tokens"][i]:
            return ["draw", i]
    return ["right", None]


def _answer(draw: Draw, n: int) -> Answer:
    return {"tokens": [draw.integer(0, 99) for _ in range(n)],
            "log_probs": [round(-6 * draw.random.random() - 0.1, 4) for _ in range(n)]}  # fmt: skip


def _other(draw: Draw, answer: Answer, at: int) -> Answer:
    """The same before place `at`, another token there, and another text after it."""
    more = _answer(draw, len(answer["tokens"]) - at)
    more["tokens"][0] = (answer["tokens"][at] + 1) % 100
    return {name: answer[name][:at] + more[name] for name in answer}


def _damaged(served: Answer, at: int, by: float) -> list[float]:
    """What a sound pass says of the same tokens: nearly what the engine says, from place `at` on something else."""
    values = served["log_probs"]
    return [value + (by * (1 + i % 3) if i >= at else 4e-4 * (-1) ** i) for i, value in enumerate(values)]


def _case(draw: Draw, token: int | None, value: int | None, by: float = 0.3) -> dict[str, Any]:
    """The first token that differs from the answer alone, and the first value that differs from a sound pass."""
    n = draw.integer(7, 10)
    alone = _answer(draw, n)
    served = alone if token is None else _other(draw, alone, token)
    served = {name: list(values) for name, values in served.items()}
    return {"served": served, "alone": alone, "scored": _damaged(served, n if value is None else value, by)}


def _some(draw: Draw) -> dict[str, Any]:
    token, value = draw.choice([(None, None), (2, None), (5, None), (None, 3), (4, 2), (3, 3), (2, 5)])
    return _case(draw, token, value, draw.choice([0.3, -0.3]))


def _as_likely(draw: Draw) -> dict[str, Any]:
    """Another token, which is just as likely as that of the answer alone."""
    given = _case(draw, 3, None)
    given["alone"]["log_probs"][3] = given["served"]["log_probs"][3]
    return given


_MEMORY = {
    "served": {"tokens": [7, 3, 9], "log_probs": [-1.0, -2.0, -0.5]}, "alone": {"tokens": [7, 3, 4], "log_probs": [
        -1.0, -1.5, -1.0]}, "scored": [-1.0, -1.5, -4.0],
}  # fmt: skip
_DRAW = {
    "served": {"tokens": [7, 3, 9], "log_probs": [-1.0, -2.0, -0.5]}, "alone": {"tokens": [7, 4, 8], "log_probs": [
        -1.0, -1.5, -1.0]}, "scored": [-1.0, -2.0, -0.5],
}  # fmt: skip


DIAGNOSE = Exercise(
    "diagnose",
    reference=diagnose,
    cases=[
        Case("the second value is not what the weights give", _MEMORY),
        Case("all values are, and the second token is another one", _DRAW),
        Case("other requests", _some, points=2, hidden=True, draws=6, fixed=[
            _as_likely, lambda draw: _case(draw, 6, 2, -0.4), lambda draw: _case(draw, None, 4, 0.002),
            *((lambda draw, t=token, v=value: _case(draw, t, v)) for token, value in itertools.product(
                (None, 0, 3, 6), (None, 0, 3, 6))),
            lambda draw: _case(draw, 2, 2, -0.4), lambda draw: _case(draw, None, 4, -0.004),
            lambda draw: _case(draw, 5, 0, -0.002),
        ]),
    ],
    idea="Which of the two comparisons says something about the model's numbers, and which about the draw?",
    hint="For each place i: if served and scored differ by more than 1e-3, return ("
    "'memory', i); then, if the tokens of "
    "served and alone differ, return ('draw', i). At the end ('right', None).",
)  # fmt: skip
