"""Splits CUDA C++ into tokens as a compiler does: line joins, comments, literals, macros.

The problem in a sentence: a rule that searches a text for `asm` can be evaded by `as\\<newline>m`, by a `'` that hides
what follows it, or by a macro; so rules are applied to the tokens that a compiler would see.

| in the text                                | becomes                                                                 |
|--------------------------------------------|-------------------------------------------------------------------------|
| a backslash at the end of a line           | the lines are joined, also inside of a word                             |
| comments                                   | a space                                                                 |
| `1'000`, `0x1p3f`, `.5f`                   | a number; one that C++ does not have is refused                         |
| `"..."`                                    | a string; raw strings and characters are refused                        |
| `%:`, `??=`, `<%`, `\\u0061`               | refused, as is everything that is not ASCII                             |
| `#define N 4`, `#define SQ(x) ((x) * (x))` | a macro, expanded here; `#` and `##` inside of one are refused          |
| `#pragma unroll`                           | nothing: it changes no result                                           |
| any other `#`                              | refused                                                                 |

A compiler gets tokens from `labkit/cuda_parse.py`, never the original text.

Source: ISO C++17, 5.2 (phases of translation) and 19 (preprocessing).
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator

from minimegatron.errors import MinimegatronError

_MAX_WORDS = 50_000
_PIECE = re.compile(
    r"""(?P<space>[ \t\r\f\v]+|//[^\n]*|/\*.*?\*/)|(?P<newline>\n)
    |(?P<raw>(?:u8|u|U|L)?R")|(?P<string>(?:u8|u|U|L)?"(?:[^"\\\n]|\\[^\n])*")
    |(?P<number>\.?[0-9](?:[eEpP][+-]|'?[0-9A-Za-z_]|\.)*)|(?P<name>[A-Za-z_][A-Za-z_0-9]*)|(?P<char>')
    |(?P<second>\?\?[=/'()!<>-]|%:|<%|%>|<:|:>)
    |(?P<mark><<=|>>=|->\*|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\#\#|::|[-+*/%&|^~!<>=?:;,.(){}\[\]\#])""",
    re.X | re.S,
)
_NUMBER = re.compile(
    r"(?:0[xX][0-9a-fA-F]+|0[bB][01]+|[0-9]+)(?:[uU](?:ll?|LL?)?|(?:ll?|LL?)[uU]?)?"
    r"|(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)[fFlL]?"
    r"|0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+[fFlL]?"
)

_STRING = re.compile(r'"(?:[ !#-\[\]-~]|\\[nt"\\])*"')


class CompileError(MinimegatronError):
    """The compiler, or a rule of the lab, refused a kernel. `line` is that of the cell, 0 where unknown."""

    def __init__(self, what: str, line: int = 0) -> None:
        super().__init__(what, where=f"line {line} of the cell" if line else "", fix="mend the kernel")
        self.line = line


@dataclasses.dataclass(frozen=True)
class Word:
    """One token of C++. `kind` is name, number, string, mark or end."""

    kind: str
    text: str
    line: int
    glued: bool = False  # no space stands before it


@dataclasses.dataclass(frozen=True)
class _Macro:
    parameters: tuple[str, ...] | None  # None: used without parentheses
    body: tuple[Word, ...]


def words(source: str, line: int = 1) -> list[Word]:
    """The tokens of a text with macros expanded, and one of kind end.

    Args:
        line: line of the cell on which the text begins.
    Raises:
        CompileError: the text has something that a kernel of a lab may not use.
    """
    macros: dict[str, _Macro] = {}
    found: list[Word] = []
    pending: list[Word] = []
    replaced = Counter[None]()
    for row in _rows(source, line):
        if row[0].text == "#" and row[0].kind == "mark":
            found += _expanded(pending, macros, frozenset(), replaced)
            pending = []
            _directive(row, macros)
        else:
            pending += row
    found += _expanded(pending, macros, frozenset(), replaced)
    for word in found:
        if word.text in ("#", "##"):
            raise CompileError(f"`{word.text}` stands in the middle of a line", word.line)
    return [*found, Word("end", "", found[-1].line if found else line)]


def _rows(source: str, first: int) -> Iterator[list[Word]]:
    """The tokens of each line; lines that end in a backslash are joined."""
    joins, text, at = [], [], 0
    for join in re.finditer(r"\\[ \t\r]*\n", source):
        text.append(source[at : join.start()])
        at = join.end()
        joins.append(sum(map(len, text)))
    joined = "".join((*text, source[at:]))
    newlines = [match.start() for match in re.finditer("\n", joined)]
    row: list[Word] = []
    where, count, glued = 0, 0, False
    while where < len(joined):
        line = first + bisect.bisect_left(newlines, where) + bisect.bisect_right(joins, where)
        piece = _PIECE.match(joined, where)
        if piece is None:
            raise CompileError(_why_not(joined[where]), line)
        kind, shown = str(piece.lastgroup), piece[0]
        where = piece.end()
        if kind == "newline":
            if row:
                yield row
            row = []
        elif kind != "space":
            count += 1
            if count > _MAX_WORDS:
                raise CompileError("a kernel of so many words is none of this lab", line)
            row.append(_word(kind, shown, line, glued))
        glued = kind not in ("newline", "space")
    if row:
        yield row


def _why_not(letter: str) -> str:
    if letter == "\\":
        return "no backslash outside of a string"
    if letter == '"':
        return 'a string has no end: `"`'
    if letter == "/":
        return "a comment has no end: `/*`"
    return f"a kernel is written in ASCII; this is not: {letter!r}"


def _word(kind: str, text: str, line: int, glued: bool) -> Word:
    if kind in ("raw", "char"):
        what = "raw string" if kind == "raw" else "character"
        raise CompileError(f"no {what} in a kernel: `{text}`", line)
    if kind == "second":
        raise CompileError(f"write the character itself in place of `{text}`", line)
    if kind == "number":
        plain = text.replace("'", "")
        if not _NUMBER.fullmatch(plain):
            raise CompileError(f"this is no number of C++: `{text}`", line)
        return Word(kind, plain, line, glued)
    if kind == "string" and (text[0] != '"' or "??" in text or not _STRING.fullmatch(text)):
        raise CompileError(f'a string is of ASCII, with \\n, \\t, \\" and \\\\, and without ??: `{text}`', line)
    return Word(kind, text, line, glued)


# ------------------------------------------------------------------------------------------------------------- macros


def _directive(row: list[Word], macros: dict[str, _Macro]) -> None:
    line, name = row[0].line, row[1].text if len(row) > 1 else ""
    if name == "pragma" and len(row) > 2 and row[2].text == "unroll":
        return
    if name == "undef" and len(row) == 3:
        macros.pop(row[2].text, None)
        return
    if name != "define" or len(row) < 3 or row[2].kind != "name":
        shown = "#" + " ".join(word.text for word in row[1:4])
        raise CompileError(f"only `#pragma unroll` and `#define` may begin with #: `{shown}`", line)
    body = row[3:]
    parameters = None
    if body and body[0].text == "(" and body[0].glued:
        end = next((i for i, word in enumerate(body) if word.text == ")"), None)
        names = [word.text for word in body[1:end:2]] if end else []
        well = end is not None and all(w.text == "," for w in body[2:end:2]) and len(set(names)) == len(names)
        if not well or any(word.kind != "name" for word in body[1:end:2]):
            raise CompileError(f"the parameters of this macro are names between commas: `{row[2].text}`", line)
        parameters, body = tuple(names), body[(end or 0) + 1 :]
    if bad := next((word for word in body if word.text in ("#", "##", "__VA_ARGS__")), None):
        raise CompileError(f"no `{bad.text}` in a macro", bad.line)
    macros[row[2].text] = _Macro(parameters, tuple(body))


def _expanded(row: list[Word], macros: dict[str, _Macro], busy: frozenset[str], replaced: Counter[None]) -> list[Word]:
    """The tokens with each macro expanded, except those that are being expanded (`busy`).

    `replaced` counts tokens that were visited: nested empty macros produce none, and would take for ever.
    """
    out: list[Word] = []
    at = 0
    while at < len(row):
        word = row[at]
        at += 1
        macro = macros.get(word.text) if word.kind == "name" and word.text not in busy else None
        if macro is None or (macro.parameters is not None and (at >= len(row) or row[at].text != "(")):
            out.append(word)
            continue
        replaced[None] += 1 + len(macro.body)
        if replaced[None] > _MAX_WORDS:
            raise CompileError(f"the macro {word.text} makes too many words", word.line)
        body = list(macro.body)
        if macro.parameters is not None:
            given, at = _arguments(row, at)
            if len(given) != len(macro.parameters) and not (not macro.parameters and given == [[]]):
                raise CompileError(f"the macro {word.text} takes {len(macro.parameters)} arguments", word.line)
            by_name = dict(
                zip(macro.parameters, (_expanded(one, macros, busy, replaced) for one in given), strict=False)
            )
            body = [new for old in body for new in by_name.get(old.text, [old])]
        body = [dataclasses.replace(one, line=word.line) for one in body]
        out += _expanded(body, macros, busy | {word.text}, replaced)
        if len(out) > _MAX_WORDS:
            raise CompileError(f"the macro {word.text} makes too many words", word.line)
    return out


def _arguments(row: list[Word], at: int) -> tuple[list[list[Word]], int]:
    """The arguments of a macro from its parenthesis on, and the index after them."""
    given: list[list[Word]] = [[]]
    depth = 0
    for i in range(at, len(row)):
        text = row[i].text
        depth += (text in "([{") - (text in ")]}") if row[i].kind == "mark" else 0
        if depth == 0:
            return given, i + 1
        if text == "," and depth == 1:
            given.append([])
        elif i > at:
            given[-1].append(row[i])
    raise CompileError("the parenthesis of a macro has no end", row[at].line)
