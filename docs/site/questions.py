"""All questions on one page, by check-list, with folded answers: `minimegatron quiz` to be read (`labkit/cards`)."""

from __future__ import annotations

from itertools import groupby
from random import Random

from labkit.cards import cards, shown
from labkit.said import say

WORDS = {
    "en": (
        "Questions",
        "What an interviewer asks, in three check-lists. Say your answer aloud before you open the one here; the labs "
        "answer theirs by measurement. The numbers of a question are an example: `minimegatron quiz` draws others each "
        "time, judges what you type, and keeps what you can. [中文](zh/questions.md)",
        "Open the lab",
        "answer",
    ),
    "zh": (
        "问题",
        "面试官会问的问题，分成三张清单。先把答案大声说出来，再展开这里的答案；实验末尾的那些问题，实验里有测量给出的答案。"
        "题目里的数只是一个例子：`minimegatron quiz --language zh` 每次换一组数，判断你输入的答案，并记下你会了什么。"
        "[English](../questions.md)",
        "打开实验",
        "答案",
    ),
}


def page(language: str, labs: list[str]) -> str:
    """The page, as Markdown: a section for each check-list, a folded answer below each question.

    Args:
        language: of `WORDS`.
        labs: names of the labs, `01_process_groups`.
    """
    title, words, opened, answer = WORDS[language]
    lines = [f"# {title}", words]
    for level, of_level in groupby(cards("course", language), lambda card: card.level):
        lines.append(f"## {say(level, language).capitalize()}")
        for can, of_can in groupby(of_level, lambda card: (card.can, card.lab)):
            lines.append(f"### {can[0][0].upper()}{can[0][1:]}")
            lines += [f"[{opened}](labs/{name}.ipynb)" for name in labs if can[1] and name.startswith(can[1])]
            for card in of_can:
                text, number, how = card.ask(Random(card.name))
                told = how if number is None else f"**{shown(number)}** · {how}"
                lines += [f"#### {text}", f"<details><summary>{answer}</summary>", told, "</details>"]
    return "\n\n".join(lines) + "\n"
