"""Every number that lab 11's text states, computed anew: a sentence that drifts from its number fails here."""

from __future__ import annotations

import math
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.course.marked import LABS

LAB = LABS["11_post_training"].lab
SOURCE = Path(str(import_module("course.11_post_training").__file__)).with_name("lab.py")
TEXT = " ".join(line.removeprefix("#").strip() for line in SOURCE.read_text().splitlines())
MINUTES = {"A": 50, "B": 60, "C": 100, "D": 45, "E": 45}
LLAMA = 8_030_261_248


def right(exercise: str, case: int = 0, **inputs: Any) -> Any:
    reference = LAB[exercise].reference
    assert reference is not None
    return reference(**{**LAB[exercise].cases[case].inputs, **inputs})  # type: ignore[dict-item]


def fraction(number: float) -> str:
    found = Fraction(number).limit_denominator(1000)
    return f"{found.numerator}/{found.denominator}"


SIZES = right("adapter_state")
WEIGHTS = {
    way: right("token_weights", counts=counts, way=way)
    for way, counts in (("tokens", [[3, 2], [4, 0]]), ("padding", [[3, 2], [4, 0]]))
}
COLUMN = LAB["adapter"].reference(LAB["adapter"].cases[0].inputs)  # type: ignore[misc]
LOSS, GRADIENT = right("dpo")
GROUP, OTHERS = (right("advantages", case).tolist() for case in (0, 1))
DOUBLED = right("policy_loss", 1)["loss"][0, 1:].tolist()
KL = right("kl_estimates")
WEIGHED, MASKED = (right("importance", case)["weights"][0].tolist() for case in (0, 1))

STATED = [
    ("Together {} hours", sum(MINUTES.values()) // 60),
    ("| A | 1 The problem · 2 Predict | {} min |", MINUTES["A"]),
    ("| B | 3 Implement: conversations, adapters | {} h |", MINUTES["B"] // 60),
    ("| C | 3 Implement: pairs, rewards | {} h {} min |", [*divmod(MINUTES["C"], 60)]),
    ("| D | 4 Run · 5 See | {} min |", MINUTES["D"]),
    ("| E | 6 Break it · 7 Explain | {} min |", MINUTES["E"]),
    ("8B has {:.2f}·10⁹ parameters. Its weights in bf16 are {:.0f} GB, a fifth", [LLAMA / 1e9, 2 * LLAMA / 1e9]),
    ("beside the weight in bf16: {} bytes", 2 + 4 + 4 + 4 + 4),
    ("(8 + 12) + (12 + 8) = {whole} parameters", SIZES),
    ("6 + 8 of the second: {rank}.", SIZES),
    ("28 · 18 + 24 · 2 = {bytes} bytes", SIZES),
    ('{{"whole": {whole}, "rank": {rank}, "bytes": {bytes}}} in the example', SIZES),
    ("By `tokens` each of the nine weighs {}.", fraction(WEIGHTS["tokens"][0][0])),
    ("weighs 1/{} in its microbatch, and {} in the step", [2 * 8, fraction(WEIGHTS["padding"][1][0])]),
    ("weighs twenty times as much as one of the answer with {}", 20 * 2),
    ("u = {:.0f}, and what is added is ({:.0f} {:.0f})", [3 + 8, *(one["y"].item() for one in COLUMN)]),
    ("A's gradient is ({:.0f} {:.0f})", COLUMN[0]["da"].flatten().tolist()),
    ("The margin is 0, the loss log 2 = {:.2f}", LOSS.item()),
    ("By `group` the advantages are {:.1f}, {:.1f}, {:.1f}, {:.1f} (nearly)", GROUP),
    ("the losses are {:.1f} and {:.1f}. By answer", DOUBLED),
    ("d is {:.3f} for the first word, {:.3f} for the second", [math.log(0.25 / 0.5), math.log(0.75 / 0.5)]),
    ("½ · 0.693 - ½ · 0.405 = {:.3f}; that is KL", KL["k1"][0].item()),
    ("gradient of k3 with respect to the two logits is ({:.2f}, {:.2f})", KL["k3"][1].tolist()),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "value"), STATED, ids=[sentence[:40] for sentence, _ in STATED])
def test_the_text_states_what_comes_out(sentence: str, value: Any) -> None:
    if isinstance(value, dict):
        said = sentence.format(**value)
    else:
        said = sentence.format(*value) if isinstance(value, list) else sentence.format(value)
    assert " ".join(said.split()) in " ".join(TEXT.split()), f"the lab does not say: {said}"


def test_fractions_that_the_text_writes_out() -> None:
    torch.testing.assert_close(GRADIENT, torch.tensor([[[-0.25, 0.25]], [[-0.25, 0.25]]]))
    assert "gradient is -½ · (1 - ½, -½) = (-¼, ¼); in the other row it is ½ · (-½, 1 - ½), the same numbers" in TEXT
    assert (
        OTHERS == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3]) and "the first is compared with 0: 1, -⅓, -⅓, -⅓" in TEXT
    )
    assert WEIGHED[1:] == pytest.approx([0.5, 3.0]) and MASKED[1:] == pytest.approx([2.0, 2.0])
    assert "By token the ratios are ½ and 4, and weigh ½ and 3, or ½ and 0. By sequence it is 2 for both" in TEXT
    assert right("policy_loss", 2)["loss"][0, 1:].tolist() == pytest.approx([-0.5 * 2**0.5] * 2)


def test_the_example_of_a_conversation_is_the_visible_case() -> None:
    inputs = LAB["spoken"].cases[0].inputs
    ids, counts = inputs["ids"], right("spoken")  # type: ignore[index, call-overload]
    assert f"conversation {' '.join(map(str, ids))} has twelve labels; three of them count: 7, 8 and the 2" in TEXT
    assert [token for token, count in zip(ids[1:], counts, strict=True) if count] == [7, 8, 2] and len(counts) == 12
