"""Conversations that every machine has, as lines of JSONL: nothing is downloaded.

    docstrings    "What does `textwrap.dedent` do?"   the first sentence of its docstring in the standard library
    arithmetic    "3 + 14 ="                          "17"

Both are functions of nothing but Python's version and the seed. As preferences, the chosen answer is the right one, and
the rejected one is another question's answer: a rule, so a reward that is learned from them can be judged.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUMS = 100  # a + b with both below


def lines(name: str, prefers: bool, seed: int = 0) -> list[dict[str, Any]]:
    """Lines of `docstrings` or `arithmetic`, shuffled: prompt and completion, or prompt, chosen and rejected.

    Args:
        name: of the table above.
        prefers: as preferences.
        seed: of the order, and of the rejected answers.
    """
    pairs = list({"docstrings": docstrings, "arithmetic": arithmetic}[name]())
    random.Random(seed).shuffle(pairs)
    if not prefers:
        return [{"prompt": prompt, "completion": answer} for prompt, answer in pairs]
    others = pairs[1:] + pairs[:1]
    return [
        {"prompt": prompt, "chosen": answer, "rejected": other}
        for (prompt, answer), (_, other) in zip(pairs, others, strict=True)
        if answer != other
    ]


def arithmetic() -> Iterator[tuple[str, str]]:
    """(question, answer) of every sum of two numbers below 100."""
    for a in range(SUMS):
        for b in range(SUMS):
            yield f"{a} + {b} =", f" {a + b}"


def docstrings() -> Iterator[tuple[str, str]]:
    """(question, answer) for the public functions and classes of the standard library that have a docstring."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith(
                "_"
            ):
                sentence = re.split(r"(?<=[.])\s|\n\n", ast.get_docstring(node) or "", maxsplit=1)[0]
                sentence = " ".join(sentence.split())
                if len(sentence.split()) >= 4:
                    yield f"What does `{path.stem}.{node.name}` do?\n", sentence
