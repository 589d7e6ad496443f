"""Environments of tests."""

from __future__ import annotations

from collections.abc import Sequence

from minimegatron.posttraining.environments import Problem, Turn


class Long:
    """Prompts of more than two pages of the engine, so that their keys and values are found again."""

    def problems(self, held_out: bool) -> Sequence[Problem]:
        return [Problem("the quick brown fox jumps over the lazy dog " + end) for end in "abcdef"]

    def turn(self, problem: Problem, answers: Sequence[str]) -> Turn:
        return Turn(float("a" in answers[-1]))
