"""The questions at the end of a lab, taken from its source, or from the translation of its cells.

A question is an item of the list in a lab's section *Explain*: `1. *question?*` and then its answer, folded
(`<details><summary>answer</summary>...</details>`) or not. The website reads labs without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minimegatron.commands.prose import ENGLISH, read, stamp

_SECTION = re.compile(r"^## \d+ · (?:Explain|讲明白)$", re.M)
_ITEM = re.compile(r"^\d+\. \*(?P<question>.+?)\*\s(?P<answer>.*?)(?=^\d+\. \*|^\S|\Z)", re.M | re.S)
CHINESE = "[\u3000-\u9fff\uff00-\uffef]"  # a character, or a mark
_FOLDED = re.compile(r"<details><summary>[^<]*</summary>(.*?)</details>", re.S)


@dataclass(frozen=True)
class Question:
    """A question of a lab, and its answer, as Markdown."""

    question: str
    answer: str


def markdown_of(source: Path, language: str = ENGLISH) -> str:
    """The text cells of a lab's source; those that are translated and not outdated in this language."""
    cells = re.split(r"^# %%", source.read_text(encoding="utf-8"), flags=re.M)
    texts = [
        re.sub(r"^# ?", "", cell.partition("\n")[2], flags=re.M) for cell in cells if cell.startswith(" [markdown]")
    ]
    said = {one.of: one.text for one in read(source.with_name(f"{language}.md")).values()}
    return "\n".join(f"{said[stamp(text)]}\n" if stamp(text) in said else text for text in texts)


def title_of(text: str) -> str:
    """The title of a lab: `Lab 01 · Process groups`."""
    return re.findall(r"^# (.*)$", text, re.M)[0]


def questions(text: str) -> Iterator[Question]:
    """The questions in a lab's text."""
    section = _SECTION.split(text, maxsplit=1)[1].split("\n## ")[0]
    for item in _ITEM.finditer(section):
        folded = _FOLDED.search(item["answer"])
        yield Question(in_one_line(item["question"]), in_one_line(folded[1] if folded else item["answer"]))


def in_one_line(text: str) -> str:
    """A text without its line breaks; between Chinese characters, and behind a Chinese mark, none becomes a blank."""
    return " ".join(re.sub(rf"(?<={CHINESE})\s*\n\s*(?={CHINESE})|(?<=[，。、；：？！）])\s*\n\s*", "", text).split())
