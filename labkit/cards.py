"""All questions of a course, in a language: those with numbers (`course/quiz`), and those that end labs (`explain`).

| piece                          | in `course/quiz.zh.md`                                           |
|--------------------------------|------------------------------------------------------------------|
| a line of a check-list         | `can NAME`                                                       |
| a question and how one gets it | `question NAME`: two paragraphs, with the fields of the English  |

A question that is not translated, or has changed since, is asked in English. The website makes its page of this,
without torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from labkit.explain import Question, markdown_of, questions, title_of
from labkit.said import say
from minimegatron.commands.prose import ENGLISH, Which, in_language, read
from minimegatron.errors import ConfigError


@dataclass(frozen=True)
class Card:
    """A question: for each call, its text, the answer (None: the reader judges), and how one gets it."""

    name: str
    level: str
    can: str
    ask: Callable[[Random], tuple[str, float | None, str]]
    lab: str = ""


def pieces(quiz: Any) -> dict[Which, str]:
    """What is to be translated of a module of questions, in its order."""
    found: dict[Which, str] = {}
    for one in quiz.QUESTIONS.values():
        found |= {Which("can", one.can.name): one.can.text, Which("question", one.name): f"{one.text}\n\n{one.how}"}
    return found


def cards(course: str, language: str = ENGLISH) -> list[Card]:
    """All questions: of each check-list those with numbers, then those of its labs.

    Raises:
        ConfigError: there is no such course, or it has no quiz.
    """
    try:
        quiz = importlib.import_module(f"{course}.quiz")
    except ModuleNotFoundError as error:
        raise ConfigError(f"no quiz in `{course}`: {error}", fix="--course with a package that has a quiz.py") from None
    folder = Path(str(quiz.__file__)).parent
    there = read(folder / f"quiz.{language}.md")

    def numeric(one: Any) -> Card:
        words = in_language(there, Which("question", one.name), f"{one.text}\n\n{one.how}").split("\n\n")
        can = in_language(there, Which("can", one.can.name), one.can.text)
        return Card(one.name, one.can.level, can, lambda draw: one.ask(draw, *words))

    def told(lab: str, number: int, title: str, one: Question) -> Card:
        can = say("of-a-lab", language, title=title)
        return Card(f"lab {lab}, {number}", quiz.LABS[lab], can, lambda _: (one.question, None, one.answer), lab)

    found = [numeric(one) for one in quiz.QUESTIONS.values()]
    for source in sorted(folder.glob("[0-9][0-9]_*/lab.py")):
        text, lab = markdown_of(source, language), source.parent.name
        if lab[:2] in quiz.LABS:
            found += [told(lab[:2], i, title_of(text), one) for i, one in enumerate(questions(text), 1)]
    return sorted(found, key=lambda card: quiz.LEVELS.index(card.level))  # stable: the order within a level stays


def shown(answer: float) -> str:
    """An answer as it is printed: a count whole, a size with four digits."""
    return f"{answer:,}" if isinstance(answer, int) else f"{answer:.4g}"
