"""Environments: what is asked, and what an answer is worth.

    prompts(split) -> tasks               a task has a prompt, as a text or messages, and what the verifier needs
    turn(task, answers) -> Turn           after each answer of the model: the reward, or the next message

A verifier is a program, not a model: it parses an answer and never evaluates it, but for `code`, which runs it in a
child with limits (`limited`). Rewards of different parts (a right answer, a right form) are added. An environment may
go on for several turns; what it says between them is not the model's, and no loss counts it.

| `--environment` | a prompt             | reward                                                                   |
|-----------------|----------------------|--------------------------------------------------------------------------|
| `sums`          | `7+5=`               | 1 for exactly the sum, else 0                                            |
| `format`        | `cat:`               | a third for each of `<`, the word and one `>` at the end                 |
| `guess`         | a digit to be found  | 1 when it is found; a wrong guess is answered by `higher` or `lower`     |
| `code`          | write a function     | 1 if its values are right for visible and hidden arguments               |
| module:function | what it returns      | what it returns                                                          |

Megatron-LM: `megatron/rl/agent`, and the environments of `examples/rl`.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from minimegatron.errors import ConfigError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing to ask.

    Attributes:
        prompt: text, messages for the chat template, or ids.
        answer: what the verifier compares with.
    """

    prompt: str | tuple[Any, ...]
    answer: str = ""


@dataclasses.dataclass(frozen=True)
class Turn:
    """What an environment says to an answer.

    Attributes:
        reward: of this answer; those of all turns are added.
        said: what the model reads next; "" ends the episode.
        reason: why the reward is not whole, for the log.
    """

    reward: float
    said: str = ""
    reason: str = ""


class Environment(Protocol):
    """See the module."""

    def problems(self, held_out: bool) -> Sequence[Problem]:
        """All problems to train on, or those held out; always in the same order."""
        ...

    def turn(self, problem: Problem, answers: Sequence[str]) -> Turn:
        """The reward of the last of the model's answers so far, and what is said to it.

        An environment that judges many at once has a method `turns` as well: [(problem, answers)] -> [Turn].
        """
        ...


def judge(environment: Environment, played: Sequence[tuple[Problem, Sequence[str]]]) -> list[Turn]:
    """What an environment says to each of many answers."""
    together = getattr(environment, "turns", None)
    return [environment.turn(*each) for each in played] if together is None else together(played)


class Sums:
    """Sums of two numbers of one digit: `3+9=`, and the answer `12`.

    Every fifth problem is held out.
    """

    def problems(self, held_out: bool) -> Sequence[Problem]:
        found = [Problem(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]
        random.Random(0).shuffle(found)
        return [problem for i, problem in enumerate(found) if (i % 5 == 0) == held_out]

    def turn(self, problem: Problem, answers: Sequence[str]) -> Turn:
        return Turn(float(answers[-1].strip() == problem.answer))


class Format:
    """A word that should come back in brackets: a third of the reward for each part of `<word>` that is there."""

    words = ("all", "bit", "cat", "dog", "egg", "fan", "gum", "hat", "ice", "jam")

    def problems(self, held_out: bool) -> Sequence[Problem]:
        return [Problem(f"{word}:", word) for i, word in enumerate(self.words) if (i % 5 == 0) == held_out]

    def turn(self, problem: Problem, answers: Sequence[str]) -> Turn:
        text = answers[-1].strip()
        parts = (text.startswith("<"), problem.answer in text, text.endswith(">") and text.count(">") == 1)
        return Turn(sum(parts) / 3)


class Guess:
    """A digit to be found; `higher` and `lower` after each guess, at most four guesses."""

    most = 4

    def problems(self, held_out: bool) -> Sequence[Problem]:
        return [] if held_out else [Problem("digit?", str(digit)) for digit in range(10)]

    def turn(self, problem: Problem, answers: Sequence[str]) -> Turn:
        guess = answers[-1].strip()
        if guess == problem.answer:
            return Turn(1.0)
        if len(answers) == self.most or not (guess.isdigit() and len(guess) == 1):
            return Turn(0.0)
        return Turn(0.0, " higher " if guess < problem.answer else " lower ")


ENVIRONMENTS: dict[str, Callable[[], Environment] | str] = {
    "sums": Sums,
    "format": Format,
    "guess": Guess,
    "code": "minimegatron.posttraining.programs:Code",
}


def environment(name: str) -> Environment:
    """The environment of `--environment`.

    Raises:
        ConfigError: there is none of this name, the module or function does not exist, or the machine cannot limit
            programs.
    """
    known = ENVIRONMENTS.get(name, name)
    if not isinstance(known, str):
        return known()
    module, colon, function = known.partition(":")
    if not colon:
        raise ConfigError(
            f"--environment {name}: no such environment",
            fix=did_you_mean(name, ENVIRONMENTS) or f"one of {', '.join(ENVIRONMENTS)}, or module:function",
        )
    try:
        made: Any = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"--environment {name}: {error}", fix="a module on PYTHONPATH, and a function of it"
        ) from error
    return made  # type: ignore[no-any-return]
