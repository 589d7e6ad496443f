"""Edits for `tests/course/mutants` in CUDA texts, `Kernel(r\"\"\"...\"\"\")`: by words, line by line.

__syncthreads();               nothing                   a barrier is missing
i < cols, i <= cols            the other                 a bound is off by one
16, 256                        8, 128; 32                a tree or a butterfly that begins too late, a wrong stride
sum += v                       sum = v                   only the last counts
+ eps, / cols, * gamma[i]      nothing                   a part of the formula
threadIdx.x, blockIdx.x        0                         one thread for all
if (...) return;               nothing                   a guard
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Set

_EDITS: tuple[tuple[str, str, str | Callable[[re.Match[str]], str]], ...] = (
    ("barrier dropped", r"__sync(?:threads|warp)\([^)]*\);", ";"),
    ("`<=` for `<`", r" < ", " <= "),
    ("`<` for `<=`", r"<=", "<"),
    ("`>` for `>=`", r">=", ">"),
    ("`>=` for `>`", r" > ", " >= "),
    ("`=` for `+=`", r"\+=", "="),
    ("half of it", r"(?<![\w.])(?:2|4|8|16|32|64|128|256|512)(?![\w.])", lambda m: str(int(m[0]) // 2)),
    ("twice it", r"(?<![\w.])(?:1|2|4|8|16|32|64|128|256)(?![\w.])", lambda m: str(int(m[0]) * 2)),
    ("1 for 0", r"(?<![\w.\[])0(?![\w.])", "1"),
    ("eps dropped", r"\+\s*eps\b", ""),
    ("division dropped", r"/\s*\w+(?:\.\w+)?", ""),
    ("factor dropped", r"\*\s*(?:\w+\[[^\]]*\]|rstd\b|gamma\w*)", ""),
    ("sqrtf for rsqrtf", r"\brsqrtf\b", "sqrtf"),
    ("fminf for fmaxf", r"\bfmaxf\b", "fminf"),
    ("thread 0 for all", r"\bthreadIdx\.x\b", "0"),
    ("block 0 for all", r"\bblockIdx\.x\b", "0"),
    ("guard dropped", r"if \([^;{]*\) (?:return|continue|break);", ";"),
    ("condition dropped", r"(?<!else )if \((?:[^()]|\([^()]*\))*\)", ""),
    ("prefix for postfix: one more", r"\+ 1\b", "+ 2"),
    ("`+` for `*`", r"(?<=\w) \* (?=\w)", " + "),
    ("`-` for `+`", r"(?<=[\w\])]) \+ (?=[\w(])", " - "),
    ("`/` for `%`", r" % ", " / "),
    ("another lane", r"__shfl_(?:xor|down)_sync", lambda m: "__shfl_up_sync" if "down" in m[0] else "__shfl_down_sync"),
    ("shuffle among half of the warp", r"0xffffffff\b", "0xffff"),
)


def edits(text: str, lines: Set[int]) -> Iterator[tuple[int, str, str]]:
    """(line, what was done, the whole cell) for each edit of a kernel's text at a place in `lines`."""
    inside = {line for first, last in _texts(text) for line in range(first, last + 1)} & set(lines)
    rows = text.splitlines(keepends=True)
    for number in sorted(inside):
        code = rows[number - 1].partition("//")[0]
        for what, pattern, new in _EDITS:
            for found in re.finditer(pattern, code):
                edited = code[: found.start()] + found.expand(new) if isinstance(new, str) else (
                    code[: found.start()] + new(found)
                )  # fmt: skip
                row = edited + rows[number - 1][found.end() :]
                shown = " ".join(found[0].split())
                yield number, f"{what}: `{shown}`", "".join([*rows[: number - 1], row, *rows[number:]])


def _texts(text: str) -> Iterator[tuple[int, int]]:
    """First and last line of every text in `Kernel(...)`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Kernel" and node.args:
            yield node.args[0].lineno, node.args[0].end_lineno or node.args[0].lineno
