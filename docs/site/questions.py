"""All questions of all labs on one page, with folded answers, taken from the labs' sources (`labkit/explain`)."""

from __future__ import annotations

from labkit.explain import questions, title_of


def page(labs: dict[str, str]) -> str:
    """The page, as Markdown: a section for each lab, a folded answer below each question.

    Args:
        labs: name of a lab -> its text.
    """
    lines = [
        "# Questions",
        "",
        "What an interviewer asks, lab by lab. Say your answer aloud before you open the one here. The labs answer "
        "these by measurement. `minimegatron quiz` asks them too, with others that are answered by a number, and keeps "
        "what you can.",
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
