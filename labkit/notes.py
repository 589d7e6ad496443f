"""A verdict's note in the language of the labs.

    in_words("rank 0: dq is wrong (its shape); the inputs and answers of this case stay hidden")
                                                  'rank 0：dq 不对（形状）；这个用例的输入和答案保持隐藏'

The judge (`deciding`, `compare`, `parts`, `settings`, `checks`) writes notes in English, of few phrases, and a record
keeps them so. The phrases are those of `WORDS` that begin with `note-`, tried in the order in which they stand there:

| phrases            | are looked for                                                        |
|--------------------|-----------------------------------------------------------------------|
| `part`, `whole`... | where the note ends with `note-hidden`, or has only them               |
| `got`, `at`...     | everywhere                                                            |
| `with`             | at the beginning                                                      |
| all others         | before the first value that is shown                                  |

A lab's own judges write sentences of three words or more, with fields. `sentences` finds them in the source of a
module of its checks, and `with_sentences` puts translated ones in their places:

    f"rank {rank} sends {n + 1} parts; n are enough"      'rank {rank} sends {a} parts; n are enough'

The words of Python's errors, and values, stay as they are.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from labkit.said import WORDS, language, say
from minimegatron.commands.prose import Translation, Which, lines_in_language, read

_PREFIX = "note-"
_OF_PARTS = ("part", "whole", "way", "hidden")
_AROUND_VALUES = ("got", "at", "differ", "missing", "more", "also")
_AT_THE_START = ("with",)
_FIELDS = {"count": r"\d+", "all": r"\d+", "next": r"\d+", "call": r"\w+", "got": ".+?"}
_NAMES = "[^();:]+?"  # what all other fields hold: a name, or some
_ERROR = re.compile(r"\b[A-Za-z]\w*(?:Error|Exception|Interrupt|Exit)\b")
# Before the error that a program has raised, at the beginning of a note.
_RAISED = re.compile(rf"(?:(?:every rank|ranks? [\d, a-z]+|with [^:]*): )*{_ERROR.pattern}")
_OF_NAMES = re.compile(r"(?:[^():;,]+ is wrong(?: \([A-Za-z ]+\))?(?:, (?=.)|\Z))+")
_VALUE = re.compile(r"\bgot ")
_WORD = re.compile(r"(?<!\S)[\"'(]?[A-Za-z'-]+(?=[,;:.?)\"']*(?:\s|$))")
_HOLE = re.compile(r"\{([a-z_]\w*)\}")
# What a field at the end of a sentence holds: not what a value is, nor the next sentence.
_LAST = r"(?:\d+(?:\.\d+)?(?![\w.]))|(?:(?!: got | is wrong\b|: rank \d).)*"
_FEWEST_WORDS = 3  # of a sentence; with fewer it is a name
_ROOT = Path(__file__).parent.parent
# Modules that write sentences for every lab: the judge's, and those that say what is wrong with a list of actions.
JUDGES = (
    "labkit/checks", "labkit/closing", "labkit/deciding", "labkit/player", "labkit/playing", "labkit/settings",
    "minimegatron/parallel/pipeline/actions", "minimegatron/parallel/pipeline/schedule_check",
)  # fmt: skip


def in_words(note: str) -> str:
    """The note with the phrases that are known in the language of the labs; in English it is unchanged."""
    note = with_sentences(note, _of_judges(language()))
    if note.endswith(WORDS["note-hidden"]) or _OF_NAMES.fullmatch(note):
        return _said(note, set(_patterns()))
    error, value = _ERROR.search(note), _VALUE.search(note)
    end = error.start() if error else len(note)
    middle = min(value.start(), end) if value else end
    before = _said(note[:middle], set(_patterns()).difference(_OF_PARTS))
    return before + _said(note[middle:end], set(_AROUND_VALUES)) + note[end:]


def _said(text: str, kinds: set[str]) -> str:
    for kind, patterns in _patterns().items():
        for name, pattern in patterns if kind in kinds else []:
            text = pattern.sub(functools.partial(_phrase, name), text)
    return text


def _phrase(name: str, match: re.Match[str]) -> str:
    return say(name, **match.groupdict())


@functools.cache
def _patterns() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """{kind: [(name, pattern) of each phrase]}: the kind of `note-part-way` is `part`."""
    found: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, text in WORDS.items():
        if name.startswith(_PREFIX):
            kind = name.removeprefix(_PREFIX).split("-")[0]
            pattern = r"\A" * (kind in _AT_THE_START) + re.sub(r"\\\{(\w+)\\\}", _field, re.escape(text))
            found.setdefault(kind, []).append((name, re.compile(pattern)))
    return found


def _field(match: re.Match[str]) -> str:
    return f"(?P<{match[1]}>{_FIELDS.get(match[1], _NAMES)})"


# ------------------------------------------------------------------------------------------------ sentences of a lab


def sentences(source: str) -> list[str]:
    """The sentences that functions of this module write, each once, in their order; a value of one is a field.

    A field has the name of the variable, or a letter where it is an expression. A sentence has three words or more
    beside its fields, or is one of two that a condition chooses from (`'more' if ... else 'less'`), with which another
    one is filled in. What a function says of itself (its docstring) is none. Outside of functions what a case gives to
    those who make its judges counts: `accept=[most_bytes(2 * n, "the inputs and the output")]`.
    """
    return list(dict.fromkeys(text for node in ast.parse(source).body for text in _below(node)))


def sentences_of(lab: Path | None = None) -> dict[str, list[str]]:
    """{module: its sentences}, where it has some: of the checks in the folder of a lab; of `JUDGES` without one."""
    paths = sorted((lab / "checks").glob("*.py")) if lab else [_ROOT / f"{judge}.py" for judge in JUDGES]
    found = {path.stem: sentences(path.read_text(encoding="utf-8")) for path in paths}
    return {name: said for name, said in found.items() if said}


def translated_sentences(there: Mapping[Which, Translation], lab: Path | None = None) -> dict[str, str]:
    """{English: translated} of `sentences_of(lab)`, as far as they are in a file of translations."""
    found: dict[str, str] = {}
    for module, english in sentences_of(lab).items() if there else ():
        found |= dict(zip(english, lines_in_language(there, Which("sentences", module), english), strict=True))
    return found


@functools.cache
def _of_judges(language: str) -> dict[str, str]:
    return translated_sentences(read(Path(__file__).with_name(f"said.{language}.md")))


def _below(node: ast.AST, *, judges: bool = False) -> Iterator[str]:
    """The sentences of the functions below a node; `judges`: and the arguments of the calls there."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _written(node)
        return
    if isinstance(node, ast.Call) and judges:
        for given in [*node.args, *(keyword.value for keyword in node.keywords)]:
            if isinstance(given, ast.Constant | ast.JoinedStr):
                yield from _written(given)
    for child in ast.iter_child_nodes(node):
        yield from _below(child, judges=judges or isinstance(child, ast.keyword) and child.arg == "accept")


def _words(template: str) -> int:
    return len(_WORD.findall(_HOLE.sub(" ", template)))


def _written(node: ast.AST, *, chosen: bool = False) -> Iterator[str]:
    """The sentences below a node; `chosen`: a condition chooses it."""
    if isinstance(node, ast.Constant | ast.JoinedStr):
        text = _template([node] if isinstance(node, ast.Constant) else node.values)
        if (_words(text) >= _FEWEST_WORDS or chosen and _words(text)) and "\n" not in text:
            yield text
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.JoinedStr):
        children = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
        children.remove(node.body[0])
    for child in children:
        yield from _written(child, chosen=isinstance(node, ast.IfExp | ast.BoolOp))


def _template(parts: list[ast.expr]) -> str:
    """A string as its literal parts and its fields."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    said = []
    for part in parts:
        if isinstance(part, ast.Constant):
            said.append(str(part.value) if isinstance(part.value, str) else "")
        elif isinstance(part, ast.FormattedValue):
            name = part.value.id.lower() if isinstance(part.value, ast.Name) else next(letters)
            said.append(f"{{{name}}}")
    return "".join(said)


def with_sentences(note: str, said: Mapping[str, str], *, field: bool = False) -> str:
    """A note with the sentences of judges in another language, {English: translated}, also those that fill in others.

    `field`: it fills in another one, or stands beside one; sentences of few words are looked for only there. The one
    that takes most of the note is the outer one.
    """
    hidden = WORDS["note-hidden"]
    if note.endswith(hidden):
        return with_sentences(note.removesuffix(hidden), said) + hidden
    if _RAISED.match(note):
        return note
    best: tuple[tuple[bool, int], str, re.Match[str] | None] = ((False, 0), "", None)
    for english, pattern, short in _by_length(tuple(said)):
        if short and not field or not all(part in note for part in _literals(english)):
            continue
        found = _closest(pattern, note, tight=not english.startswith("{"))
        if found and (not short, len(found[0])) > best[0]:
            best = (not short, len(found[0])), english, found
    _, english, found = best
    if not found:
        return note
    fields = {name: with_sentences(value, said, field=True) for name, value in found.groupdict().items()}
    parts = (note[: found.start()], note[found.end() :])
    before, after = (with_sentences(part, said, field=True) for part in parts)
    return before + _filled(said[english], fields) + after


@functools.cache
def _literals(template: str) -> list[str]:
    return _HOLE.sub("\n", template).split("\n")


def _filled(template: str, fields: Mapping[str, str]) -> str:
    return _HOLE.sub(lambda field: fields.get(field[1], field[0]), template)


def _closest(pattern: re.Pattern[str], note: str, *, tight: bool) -> re.Match[str] | None:
    """The first match; `tight`: from its last possible beginning, so that no field holds another sentence."""
    found = first = pattern.search(note)
    while tight and first and found and (later := pattern.search(note, found.start() + 1)):
        if later.start() >= first.end():
            break
        found = later
    return found


@functools.cache
def _by_length(templates: tuple[str, ...]) -> list[tuple[str, re.Pattern[str], bool]]:
    """(Template, its pattern, whether it has few words); of two that take as much of a note the longer one is first."""
    ordered = sorted(templates, key=lambda one: -len(_HOLE.sub("", one)))
    return [(one, _pattern(one), _words(one) < _FEWEST_WORDS) for one in ordered]


def _pattern(template: str) -> re.Pattern[str]:
    """What a template looks like with its fields filled in; a field at its end goes as far as the note, or its value.

    Of two fields with a blank between them the first holds all words but one. A template of few words is looked for
    only as the whole of a field.
    """
    seen: set[str] = set()

    def field(match: re.Match[str]) -> str:
        name, last = match[1], match.end() == len(template)
        again = name in seen
        seen.add(name)
        some = _LAST if last else ".*" if template[match.end() : match.end() + 2] == " {" else ".*?"
        return f"(?P={name})" if again else f"(?P<{name}>{some})"

    pieces, at = [], 0
    for match in _HOLE.finditer(template):
        pieces += [re.escape(template[at : match.start()]), field(match)]
        at = match.end()
    whole = "".join(pieces) + re.escape(template[at:])
    return re.compile(whole if _words(template) >= _FEWEST_WORDS else rf"\A{whole}\Z")
