"""Whether translations say what the English says: `python -m labkit.languages zh [01 ... quiz README ...] [--todo]`.

| English                                 | in another language                        |
|-----------------------------------------|--------------------------------------------|
| prose cells of `course/NN_name/lab.py`  | `course/NN_name/zh.md`, `cell ID`          |
| `idea` and `hint` of an exercise        | the same file, `idea NAME`, `hint NAME`    |
| the cases of its check, as a list       | the same file, `cases NAME`                |
| what is told about mistakes, as a list  | the same file, `mistakes NAME`             |
| sentences of its judges, as a list      | the same file, `sentences MODULE`          |
| what is guessed, units of what it is    | the same file, `guess NAME`, `guessed UNIT`|
| questions of `course/quiz.py` (`cards`) | `course/quiz.zh.md`, `can`, `question NAME`|
| words of the machinery (`said`)         | `labkit/said.zh.md`, `word NAME`           |
| sentences of its judges (`notes.JUDGES`)| the same file, `sentences MODULE`          |
| sections of `README.md`                 | `README.zh.md`, `section ID`               |
| sections of `docs/reading_plan.md`      | `docs/reading_plan.zh.md`, `section ID`    |

A piece is lacking or outdated by the digest in its mark (`minimegatron/commands/prose`). Beside that a machine can
compare what no language changes: numbers, code, formulas, addresses of links, the shape of tables and headings. A
list is compared line by line: a translated line stands for the English one at its place, and is not wrapped. Words of
the field are in `course/terms.zh.md`, each with translations that must not be used. `--todo` prints the English of what
is lacking or outdated, under the mark that its translation needs.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from labkit.cards import pieces
from labkit.exercises import load_lab
from labkit.guesses import texts
from labkit.notes import sentences_of
from labkit.said import WORDS
from labkit.source import name_of, notebooks
from labkit.suspects import mistakes_of
from minimegatron.commands.prose import Translation, Which, bulleted, mark, read, stamp
from minimegatron.errors import ConfigError, MinimegatronError

LISTS = ("cases", "mistakes", "sentences")
QUIZ, SAID = "quiz", "said"
DOCUMENTS = {"README": "README.md", "reading_plan": "docs/reading_plan.md"}
_FENCED = re.compile(r"^[ \t]*```.*?^[ \t]*```[ \t]*$", re.S | re.M)
_MATHS = re.compile(r"\$\$.+?\$\$|\$[^$\n]+?\$", re.S)
_SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_TAG = re.compile(r"</?[a-z]+[^>]*>|<!--.*?-->", re.S)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_FIELD = re.compile(r"\{([a-z_]\w*(?::[^{}\s]*)?)\}")
_ITEM = re.compile(r"^[ \t]*[-*] ", re.M)
_HEADING = re.compile(r"^(#+) ", re.M)
_ROW = re.compile(r"^[ \t]*\|.*\|[ \t]*$", re.M)


def originals(source: Path) -> dict[Which, str]:
    """The English pieces of a lab in their order.

    Prose cells, ideas and hints, cases of checks, guesses, mistakes, sentences of judges.
    """
    (solution, _), (lab, _) = notebooks(source)
    cells = [*solution.cells, *lab.cells]
    found = {Which("cell", cell.id): cell.source for cell in cells if cell.cell_type == "markdown"}
    course = f"{source.parent.parent.name}.{name_of(source)}"
    exercises = load_lab(course).exercises
    for name, exercise in exercises.items():
        found |= {Which(kind, name): text for kind in ("idea", "hint") if (text := getattr(exercise, kind))}
    found |= {Which("cases", name): bulleted(case.what for case in one.cases) for name, one in exercises.items()}
    for cell in solution.cells:
        found |= texts(cell.source) if "guess" in cell.source and cell.cell_type == "code" else {}
    mistakes = {name: mistakes_of(course, exercise) for name, exercise in exercises.items()}
    found |= {Which("mistakes", name): bulleted(told) for name, told in mistakes.items() if told}
    return found | {Which("sentences", name): bulleted(said) for name, said in sentences_of(source.parent).items()}


def sections(page: str) -> dict[Which, str]:
    """A page, cut at its headings; each by the words of its heading."""
    fences = [match.span() for match in _FENCED.finditer(page)]
    starts = [at.start() for at in _HEADING.finditer(page) if not any(a <= at.start() < b for a, b in fences)]
    found: dict[Which, str] = {}
    for begin, end in zip(starts, [*starts[1:], len(page)], strict=True):
        text = page[begin:end].strip()
        name = re.sub(r"[^a-z0-9]+", "-", text.split("\n", 1)[0].lower()).strip("-")
        assert Which("section", name) not in found, f"two sections are called {name}"
        found[Which("section", name)] = text
    return found


def forbidden(terms: str) -> dict[str, str]:
    """{a translation that must not be used: the one to use}, from a table `| English | to use | not to use |`."""
    found: dict[str, str] = {}
    for row in _ROW.findall(terms)[2:]:
        _, use, avoid = (cell.strip() for cell in row.strip().strip("|").split("|"))
        found |= dict.fromkeys(filter(None, avoid.split("、")), use)
    return found


def problems(
    english: Mapping[Which, str], said: Mapping[Which, Translation], avoid: Mapping[str, str]
) -> Iterator[tuple[Which, str]]:
    """(Piece, what is wrong with its translation), in the order of the English."""
    for which, text in english.items():
        if which not in said:
            yield which, "is not translated"
        elif said[which].of != stamp(text):
            yield which, "has changed since it was translated"
        else:
            differ = _lines_differ if which.kind in LISTS else _differences
            yield from ((which, problem) for problem in differ(text, said[which].text))
            yield from ((which, f"says {no}, not {yes}") for no, yes in avoid.items() if no in said[which].text)
    yield from ((which, "is not in the English") for which in said if which not in english)
    order = [which for which in said if which in english]
    if order != [which for which in english if which in said]:
        first = next(a for a, b in zip(order, (w for w in english if w in said), strict=True) if a != b)
        yield first, "is at another place than in the English"


def _differences(english: str, said: str) -> Iterator[str]:
    """What no language changes, and is not the same."""
    for what, one, other in zip(_KINDS, _parts(english), _parts(said), strict=True):
        lacks, more = Counter(one) - Counter(other), Counter(other) - Counter(one)
        if lacks or more:
            both = (("lacks", lacks), ("has also", more))
            yield f"{what}: " + "; ".join(f"{word} {', '.join(map(str, c.elements()))}" for word, c in both if c)


def _lines_differ(english: str, said: str) -> Iterator[str]:
    """The same of lists, whose lines stand for each other by their places."""
    lines, others = english.splitlines(), said.splitlines()
    if len(lines) != len(others):
        yield f"has {len(others)} lines, not {len(lines)}"
    for number, (one, other) in enumerate(zip(lines, others, strict=False), 1):
        yield from (f"line {number}: {problem}" for problem in _differences(one, other))


_KINDS = ("code blocks", "formulas", "code", "links", "fields", "headings", "items", "columns of table rows", "numbers")


def _parts(text: str) -> Iterator[list[str]]:
    """The parts of a text of each of `_KINDS`."""
    inside = {_SPAN: 2, _LINK: 1, _FIELD: 1}
    for pattern in (_FENCED, _MATHS, _SPAN, _LINK, _FIELD):
        yield [match.group(inside.get(pattern, 0)) for match in pattern.finditer(text)]
        text = pattern.sub("] " if pattern is _LINK else " ", text)
    text = _TAG.sub(" ", text)
    yield _HEADING.findall(text)
    yield _ITEM.findall(text)
    yield [str(row.strip().strip("|").count("|") + 1) for row in _ROW.findall(text)]
    yield _NUMBER.findall(text)


def pages(root: Path, language: str, wanted: Sequence[str] = ()) -> Iterator[tuple[str, dict[Which, str], Path]]:
    """(Name, English pieces, file of the translation) of each lab, of quiz, words and documents.

    Raises:
        ConfigError: there is no such lab or page.
    """
    sources = {name_of(path): path for path in sorted((root / "course").glob("[0-9][0-9]_*/lab.py"))}
    names = [*sources, QUIZ, SAID, *DOCUMENTS]
    unknown = [word for word in wanted if not any(name in (word,) or name[:2] == word for name in names)]
    if unknown:
        raise ConfigError(f"there is no {' '.join(unknown)}", fix=f"choose from {' '.join(names)}")
    for name in names:
        if wanted and name not in wanted and name[:2] not in wanted:
            continue
        if name in DOCUMENTS:
            path = root / DOCUMENTS[name]
            yield name, sections(path.read_text(encoding="utf-8")), path.with_suffix(f".{language}.md")
        elif name == QUIZ:
            yield name, pieces(importlib.import_module("course.quiz")), root / f"course/quiz.{language}.md"
        elif name == SAID:
            said = {Which("sentences", module): bulleted(lines) for module, lines in sentences_of().items()}
            words = {Which("word", word): text for word, text in WORDS.items()}
            yield name, words | said, root / f"labkit/said.{language}.md"
        else:
            yield name, originals(sources[name]), sources[name].with_name(f"{language}.md")


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status: 0, or 2 when a translation is lacking, outdated or wrong."""
    parser = argparse.ArgumentParser("python -m labkit.languages", description="Compare translations with the English.")
    parser.add_argument("language", help="zh")
    parser.add_argument(
        "pages", nargs="*", help="numbers or names of labs, quiz, said, README, reading_plan; all by default"
    )
    parser.add_argument("--todo", action="store_true", help="print the English of what is lacking or outdated")
    options = parser.parse_args(argv)
    root, found = Path.cwd(), 0
    try:
        avoid = forbidden((root / f"course/terms.{options.language}.md").read_text(encoding="utf-8"))
        for name, english, path in pages(root, options.language, options.pages):
            said = read(path)
            for which, problem in problems(english, said, avoid):
                found += 1
                if not options.todo:
                    print(f"{name}: {which.kind} {which.name} {problem}")
                elif which in english and (which not in said or said[which].of != stamp(english[which])):
                    print(f"{mark(which, english[which])}\n{english[which]}\n")
        return ConfigError.exit_code if found else 0
    except MinimegatronError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
