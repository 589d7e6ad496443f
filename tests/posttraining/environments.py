"""Environments of tests."""

from __future__ import annotations

import time
from collections.abc import Sequence

from minimegatron.posttraining.environments import Problem, Turn


class Long:
    """Prompts of more than two pages of the engine, so that their keys and values are found again."""

    def problems(self, held_out: bool) -> Sequence[Problem]:
        return [Problem("the quick brown fox jumps over the lazy dog " + end) for end in "abcdef"]

    def turn(self, problem: Problem, answers: Sequence[str]) -> Turn:
        return Turn(float("a" in answers[-1]))


class Letters:
    """Every answer has another reward."""

    def problems(self, held_out: bool) -> Sequence[Problem]:
        return [Problem(f"{word}:") for word in ("abc", "def", "ghi" if held_out else "jkl")]

    def turn(self, problem: Problem, answers: Sequence[str]) -> Turn:
        return Turn(sum(i * ord(letter) for i, letter in enumerate(answers[-1])) / 100)


class Clock:
    """A verifier that says another thing each time, as a deadline may; a second turn with about half of the answers."""

    def problems(self, held_out: bool) -> Sequence[Problem]:
        return [Problem("what time is it?")]

    def turn(self, problem: Problem, answers: Sequence[str]) -> Turn:
        now = time.perf_counter_ns()
        return Turn(now % 1000 / 1000, "and now?" if len(answers) == 1 and now % 1000 < 500 else "")
