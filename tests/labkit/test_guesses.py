"""A guess is kept until it is compared, and its file can harm nothing."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from labkit.guesses import NAME, Guesses, question_of, shown, texts, unit_of
from minimegatron.commands.my_labs import SAID_IN

NO_GUESS = "○ no guess yet: put a number in place of None"


def test_a_guess_is_kept_from_one_kernel_to_the_next(tmp_path: Path) -> None:
    first = Guesses(tmp_path)
    assert first.guess("gpus", 12) == "✔ your guess: 12"
    assert first.guess("share", 0.25) == "✔ your guess: 0.25"
    again = Guesses(tmp_path)
    assert again.guessed("gpus", 7.3, "GPUs") == "it is 7.3 GPUs; you guessed 12"
    assert again.guessed("share", 0.5, "") == "it is 0.5; you guessed 0.25"
    assert again.guessed("other", 4, "steps") == "it is 4 steps; you made no guess"


def test_an_untouched_cell_shows_the_same_whatever_was_kept(tmp_path: Path) -> None:
    Guesses(tmp_path).guess("gpus", 12)
    untouched = Guesses(tmp_path)
    assert untouched.guess("gpus", None) == NO_GUESS
    assert untouched.guessed("gpus", 7.3, "GPUs") == "it is 7.3 GPUs; you made no guess"
    assert Guesses(tmp_path).guessed("gpus", 7, "GPUs").endswith("you made no guess")


@pytest.mark.parametrize("value", ["12", True, float("nan"), float("inf"), 10**400, 1j, [12], print])
def test_what_is_no_number_is_one_line(tmp_path: Path, value: Any) -> None:
    said = Guesses(tmp_path).guess("gpus", value)
    assert said.startswith("✘ ") and "is no number: write one in its place" in said and "\n" not in said
    assert len(said) < 120 and not (tmp_path / NAME).exists()


def test_what_is_no_number_leaves_an_earlier_guess(tmp_path: Path) -> None:
    guesses = Guesses(tmp_path)
    guesses.guess("gpus", 12)
    assert "is no number" in guesses.guess("gpus", "many")
    assert Guesses(tmp_path).guessed("gpus", 7, "GPUs") == "it is 7 GPUs; you guessed 12"


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"gpus": "12"}', '{"gpus": NaN}', "\x00", "null"])
def test_a_damaged_file_costs_the_guess_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    guesses = Guesses(tmp_path)
    assert guesses.guessed("gpus", 7, "GPUs") == "it is 7 GPUs; you made no guess"
    guesses.guess("gpus", 3)
    assert Guesses(tmp_path).guessed("gpus", 7, "GPUs") == "it is 7 GPUs; you guessed 3"


def test_a_folder_that_cannot_be_written_keeps_it_in_memory(tmp_path: Path) -> None:
    guesses = Guesses(tmp_path / "not there")
    guesses.guess("gpus", 3)
    assert guesses.guessed("gpus", 7, "GPUs") == "it is 7 GPUs; you guessed 3"


def test_what_is_to_be_translated_of_a_cell() -> None:
    cell = """%%needs ring
guess("no f", None, "How many?")
for batch in (1, 2):
    guessed(f"batch {batch}", round(1.5), "percent, in a ring")
guessed("same", 3, f"with {batch}")
guessed("bare", 3)
"""
    assert texts(cell) == {question_of("no f"): "How many?", unit_of("percent, in a ring"): "percent, in a ring"}
    assert question_of("no f").name == "no-f" and unit_of("%, in a ring").name == "in-a-ring"


def test_guesses_in_chinese(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SAID_IN, "zh")
    guesses = Guesses(tmp_path)
    assert guesses.guess("gpus", None).startswith("○ 还没有猜测") and "'many' 不是一个数" in guesses.guess(
        "gpus", "many"
    )
    assert guesses.guess("gpus", 12) == "✔ 你猜的是 12"
    assert guesses.guessed("gpus", 7.3, "块 GPU") == "实际是 7.3 块 GPU；你猜的是 12"
    assert guesses.guessed("other", 4, "步") == "实际是 4 步；你没有猜"


@pytest.mark.parametrize(
    ("value", "text"),
    [(12, "12"), (12.0, "12"), (7.3, "7.3"), (65536, "65,536"), (1234.56, "1,234.6"), (0.1 + 0.2, "0.3"),
     (1 / 3, "0.3333"), (-2, "-2"), (0, "0"), (1e20, "1e+20"), (Fraction(1, 4), "0.25"), (0.00012, "0.00012")],
)  # fmt: skip
def test_numbers_are_written_for_readers(value: Any, text: str) -> None:
    assert shown(value) == text
