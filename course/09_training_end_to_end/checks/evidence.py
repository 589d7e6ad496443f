"""Lab 09, two faults told from evidence: what a resumed run has forgotten, and which samples make a loss a NaN."""

from __future__ import annotations

import math
from typing import Any

from course.lab09.resumed import PARTS, logs
from labkit.exercises import Answer, Case, Draw, Exercise

# ------------------------------------------------------------------------------------------------- what was forgotten


def forgotten(straight: dict[str, Any], resumed: dict[str, Any]) -> str:
    """From the cause that all others follow from to the one that shows last."""
    same = {name: straight[name] == resumed[name] for name in straight}
    if not same["check"]:
        return "weights"
    for name, part in (("first", "position"), ("rate", "schedule"), ("scale", "scale")):
        if not same[name]:
            return part
    if straight["loss"][0] != resumed["loss"][0]:
        return "streams"
    return "nothing" if same["loss"] else "moments"


def _part(forgets: str) -> dict[str, Any]:
    return logs(3, forgets)


def _some(draw: Draw) -> dict[str, Any]:
    # behind the warm-up and before the fall a schedule that begins anew shows, and so does a scale that has moved
    return logs(draw.integer(1, 10**6), draw.choice([*PARTS, ""]), draw.choice([6, 8, 11]), draw.integer(5, 7))


FORGOTTEN = Exercise(
    "forgotten",
    reference=forgotten,
    cases=[
        Case("a run that has forgotten where it was in the data", lambda draw: _part("position")),
        Case("a run that has forgotten nothing", lambda draw: _part("")),
        Case("other runs", _some, points=3, hidden=True, draws=4, fixed=[
            *((lambda draw, part=part: _part(part)) for part in PARTS),
            lambda draw: logs(5, "moments", dropout=0.0), lambda draw: logs(5, "streams", dropout=0.0),
            lambda draw: logs(6, "schedule", at=7, steps=7, dropout=0.0),
            lambda draw: logs(9, "weights", at=6, dropout=0.0),
            lambda draw: logs(72, "moments", steps=2, dropout=0.0)]),  # one loss differs, by 0.4 %
    ],
    idea="For each part: which column does it change in the very first step, and which only later, through the "
    "weights?",
    hint="check differs: weights. first differs: position. rate: schedule. scale: scale. The first loss "
    "differs, with the "
    "same weights and samples: streams. Later losses differ: moments. All the same: nothing.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------------- bad samples


def _drive(exercise: Any, samples: Any, bad: Any) -> Any:
    calls: list[list[int]] = []

    def replay(some: list[int]) -> float:
        some = list(some)
        if not some or not set(some) <= set(samples) or len(set(some)) != len(some):
            raise ValueError(f"a replay is of some of the batch's samples, each once; got {some}")
        calls.append(some)
        return float("nan") if set(some) & set(bad) else 2.0 + len(some) / 100

    found = exercise.bad_samples(replay, list(samples))
    return {"found": found if found is None else sorted(found), "replays": len(calls)}


def bound(n: int, bad: int) -> int:
    """Replays that suffice: the whole, then two halves at each level, for each bad sample."""
    return 1 + 2 * bad * math.ceil(math.log2(n))


def _finds(answer: Answer) -> str | None:
    samples, bad = answer.inputs["samples"], sorted(answer.inputs["bad"])
    if answer.value["found"] != bad:
        missing = len(set(bad) - set(answer.value["found"] or ()))
        more = len(set(answer.value["found"] or ()) - set(bad))
        return f"missing: {missing} of {len(bad)} bad samples; returned though not bad: {more}"
    if answer.value["replays"] > (most := bound(len(samples), len(bad))):
        return f"{answer.value['replays']} replays for {len(bad)} bad of {len(samples)} samples; {most} suffice"
    return None


def _batch(draw: Draw) -> dict[str, Any]:
    n = draw.choice([16, 33, 64, 100])
    samples = draw.random.sample(range(1000), n)
    return {"samples": samples, "bad": draw.random.sample(samples, draw.choice([0, 1, 1, 2]))}


_ROW = list(range(40, 56))
BAD = Exercise(
    "bad_samples",
    drive=_drive,
    accept=[_finds],
    cases=[
        Case("16 samples, number 45 is bad", {"samples": _ROW, "bad": [45]}),
        Case("16 samples, two are bad", {"samples": _ROW, "bad": [41, 54]}, fixed=[
            {"samples": _ROW, "bad": [46, 47]}, {"samples": _ROW, "bad": []}]),
        Case("other batches", _batch, points=2, hidden=True, draws=4, fixed=[
            {"samples": list(range(64)), "bad": [63]}, {"samples": list(range(64)), "bad": [0]},
            {"samples": [7], "bad": [7]}, {"samples": [7], "bad": []}, {"samples": [5, 3], "bad": [5, 3]},
            {"samples": list(range(128)), "bad": [1, 126]}, {"samples": list(range(33)), "bad": [16]}]),
    ],
    idea="A replay of half of the batch answers for all samples in it. What do you know when it is finite, and "
    "what when it "
    "is not?",
    hint="Replay all: finite means that none is bad. Otherwise one sample alone is bad; of more, do the same with each "
    "half, and return what both have found.",
)  # fmt: skip
