"""Lab 09, a law through a few losses: judged by what it says about larger models.

The data are a law's own, or a law's with a little noise. No answer is right to the last digit, so a case asks how far
the prediction is from the law at four times the largest size, beside what there was left to predict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.exercises import Answer, Case, Draw, Exercise

FAR = 4


def _drive(exercise: Any, sizes: Any, losses: Any, law: Any) -> Any:
    found = exercise.fit(list(sizes), list(losses))
    return {name: float(found[name]) for name in ("E", "A", "alpha")}


def within(share: float) -> Callable[[Answer], str | None]:
    """Judge: the fit and the law differ by at most this share of the law's excess over its floor at the "
    "largest size."""

    def accept(answer: Answer) -> str | None:
        sizes, (floor, a, alpha) = answer.inputs["sizes"], answer.inputs["law"]
        try:
            mine = [
                answer.value["E"] + answer.value["A"] * n ** -answer.value["alpha"]
                for n in (max(sizes), FAR * max(sizes))
            ]
        except OverflowError:
            return f"E + A / N^alpha overflows at N = {FAR * max(sizes)}"
        wanted = [floor + a * n**-alpha for n in (max(sizes), FAR * max(sizes))]
        room = share * (wanted[0] - floor)
        if not abs(mine[0] - wanted[0]) <= room:
            return (
                f"at N = {max(sizes)}, the largest size given, it says {mine[0]:.4f}; the loss there is {wanted[0]:.4f}"
            )
        if not abs(mine[1] - wanted[1]) <= room:
            where = f"at N = {FAR * max(sizes)}, {FAR} times the largest size,"
            return f"{where} it says {mine[1]:.4f}; the loss there is {wanted[1]:.4f}"
        return None

    return accept


def of_law(floor: float, a: float, alpha: float, sizes: list[int], noise: Draw | None = None) -> dict[str, Any]:
    """The losses of a law; with noise of 0.2 % of what lies above the floor."""
    losses = [floor + a * n**-alpha * (1 + 0.002 * (noise.random.uniform(-1, 1) if noise else 0)) for n in sizes]
    return {"sizes": sizes, "losses": losses, "law": [floor, a, alpha]}


def _some(draw: Draw, noisy: bool = False) -> dict[str, Any]:
    first = draw.choice([50, 1000, 40_000])
    steps = [1.0, 2.2, 4.5, 11.0, 30.0][: draw.integer(4, 5)]
    sizes = [int(first * step * draw.random.uniform(0.9, 1.1)) for step in steps]
    alpha, excess = draw.random.uniform(0.4, 1.1), draw.random.uniform(0.3, 1.5)
    draw.random.shuffle(sizes)
    return of_law(draw.random.uniform(0.8, 3.0), excess * first**alpha, alpha, sizes, draw if noisy else None)


FIT = Exercise(
    "fit",
    drive=_drive,
    seconds=120.0,  # a search takes a few seconds, and a case has five of them
    cases=[
        Case("the example: losses of 2 + 8 / N^0.5", of_law(2.0, 8.0, 0.5, [16, 64, 256, 1024]), accept=[within(0.05)]),
        Case("other laws", _some, points=2, hidden=True, draws=2, accept=[within(0.05)], fixed=[
            of_law(0.0, 5.0, 0.3, [10, 40, 90, 200]),
            of_law(1.7, 400.0, 0.34, [100_000, 400_000, 1_600_000, 9_000_000]),
            of_law(2.5, 300.0, 1.2, [900, 100, 400, 200])]),
        Case("losses with a little noise, as of real runs", lambda draw: _some(draw, True), hidden=True, draws=2,
             accept=[within(0.25)]),
    ],
    errors={"KeyError": "The result is a dict with E, A and alpha.", "math domain error":
            "A logarithm of 0 or less: E must stay below the smallest loss."},
    idea="If somebody told you E, what would log(L - E) be over log N? Then how do you see that E was wrong?",
    hint="For many E below the smallest loss: fit a line to log(L - E) over log N (slope -alpha, intercept log A), and "
    "add up the squared errors of E + A / N^alpha. Take the E with the smallest sum. Try E closely spaced near the "
    "smallest loss and widely further down.",
)  # fmt: skip
