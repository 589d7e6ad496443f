"""The questions at the end of a lab, taken from its source.

A question is an item of the list in a lab's section *Explain*: `1. *question?*` and then its answer, folded
(`<details><summary>answer</summary>...</details>`) or not. This module imports nothing that is not Python's own: the
website reads labs without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ITEM = re.compile(r"^\d+\. \*(?P<question>.+?)\*\s(?P<answer>.*?)(?=^\d+\. \*|^\S|\Z)", re.M | re.S)
_FOLDED = re.compile(r"<details><summary>answer</summary>(.*?)</details>", re.S)


@dataclass(frozen=True)
class Question:
    """A question of a lab, and its answer, as Markdown."""

    question: str
    answer: str


def markdown_of(source: Path) -> str:
    """The text cells of a lab's source."""
    cells = re.split(r"^# %%", source.read_text(), flags=re.M)
    texts = [cell.partition("\n")[2] for cell in cells if cell.startswith(" [markdown]")]
    return "\n".join(re.sub(r"^# ?", "", text, flags=re.M) for text in texts)


def title_of(text: str) -> str:
    """The title of a lab: `Lab 01 · Process groups`."""
    return re.findall(r"^# (Lab .*)$", text, re.M)[0]


def questions(text: str) -> Iterator[Question]:
    """The questions in a lab's text."""
    section = re.split(r"^## \d+ · Explain$", text, maxsplit=1, flags=re.M)[1].split("\n## ")[0]
    for item in _ITEM.finditer(section):
        folded = _FOLDED.search(item["answer"])
        yield Question(" ".join(item["question"].split()), " ".join((folded[1] if folded else item["answer"]).split()))
