"""All questions of all labs on one page, with folded answers, taken from the labs' sources.

A question is an item of the list in a lab's section *Explain*: `1. *question?*` and then its answer, folded
(`<details><summary>answer</summary>...</details>`) or not.
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


def page(labs: dict[str, str]) -> str:
    """The page, as Markdown: a section for each lab, a folded answer below each question.

    Args:
        labs: name of a lab -> its text.
    """
    lines = [
        "# Questions",
        "",
        "What an interviewer asks, lab by lab. Say your answer aloud before you open the one here. The labs answer "
        "these, and more that compute, by measurement.",
        "",
    ]
    for name, text in labs.items():
        lines += [f"## {title_of(text)}", "", f"[Open the lab](labs/{name}.ipynb)", ""]
        for asked in questions(text):
            lines += [
                f"### {asked.question}",
                "",
                "<details><summary>answer</summary>",
                "",
                asked.answer,
                "",
                "</details>",
                "",
            ]
    return "\n".join(lines)
