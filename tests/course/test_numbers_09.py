"""Every number that lab 09's text states, computed anew: a sentence that drifts from its number fails here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.course.marked import LABS

LAB = LABS["09_training_end_to_end"].lab
SOURCE = Path(str(import_module("course.09_training_end_to_end").__file__)).with_name("lab.py")
TEXT = " ".join(" ".join(line.removeprefix("#").strip() for line in SOURCE.read_text().splitlines()).split())
MINUTES = {"A": 35, "B": 60, "C": 40, "D": 20, "E": 40}


def right(exercise: str, case: int = 0, **changes: Any) -> Any:
    reference = LAB[exercise].reference
    assert reference is not None
    return reference(**{**LAB[exercise].cases[case].inputs, **changes})  # type: ignore[dict-item]


MFU, EPOCHS, WORK = right("mfu"), right("epochs"), right("step_work")
TWO = right("epochs", samples=12)
PICTURE = right("epochs", tokens=12 * 25, samples=78)
PLAN = LAB["rate"].cases[0].inputs["plan"]  # type: ignore[index, call-overload]
FIT = LAB["fit"].cases[0].inputs
RATES = {
    (style, n): right("rate", n=n, plan={**PLAN, "style": style}) for style in ("cosine", "wsd") for n in range(14)
}

STATED = [
    ("Together {} h {} min", [*divmod(sum(MINUTES.values()), 60)]),
    ("| A | 1 The problem · 2 Predict | {} min |", MINUTES["A"]),
    ("| C | 3 Implement: a scaling law, the work of a step | {} min |", MINUTES["C"]),
    ("| D | 4 Run · 5 See | {} min |", MINUTES["D"]),
    ("| E | 6 Break it · 7 Explain | {} min |", MINUTES["E"]),
    ("and 40 behind it: {parameters}.", MFU),
    ("So {flops:.0f} FLOPs a token", MFU),
    ("10⁶ FLOP/s each: MFU {mfu:.3f}", MFU),
    ("They hold {samples} samples, and", EPOCHS),
    ("and two epochs hold {samples}. So one sample is needed", TWO),
    ("Three epochs are {} tokens", EPOCHS["epochs"] * 25),
    ("12 documents of 25 tokens make {samples} samples with s = 4", right("epochs", tokens=12 * 25, samples=1)),
    ("what differs are the {} samples of the second epoch", {4: "four"}[PICTURE["needed"]]),
    ("is `{}`", [right("pieces")]),
    ("At step 3 both have {}", RATES["wsd", 3]),
    ("is half-way down, at {:.0f}, and WSD still has {:.0f}", [RATES["cosine", 8], RATES["wsd", 8]]),
    ("and half of the way down: {:.0f}", RATES["wsd", 9]),
    ("the losses {:.0f}, {:.0f}, {} and {}", FIT["losses"]),  # type: ignore[index, call-overload]
    ("there are {messages} messages, of 80 bytes each: {tp_bytes:.0f} bytes", WORK),
    ("/ 2 = {flops:.0f} FLOPs, and sums 4 · 180 / 2 = {dp_bytes:.0f} bytes", WORK),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "value"), STATED, ids=[sentence[:40] for sentence, _ in STATED])
def test_the_text_states_what_comes_out(sentence: str, value: Any) -> None:
    if isinstance(value, dict):
        said = sentence.format(**value)
    else:
        said = sentence.format(*value) if isinstance(value, list) else sentence.format(value)
    assert said in TEXT, f"the lab does not say: {said}"


def test_the_example_of_a_round_is_the_visible_case() -> None:
    pair, words = right("merge_round")
    shown = ["`" + " ".join(word) + "`" for word in words]
    assert f"(l, o) comes before (o, w). After this round the words are {shown[0]}, {shown[1]} and {shown[2]}" in TEXT
    assert (
        pair == ["l", "o"] and RATES["cosine", 3] == RATES["wsd", 3] and RATES["cosine", 13] == RATES["wsd", 13] == 2.0
    )
