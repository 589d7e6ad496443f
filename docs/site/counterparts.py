"""Our file, Megatron-LM's, the paper, the lab: one page in every direction, made from docstrings.

A lecture ends with its sources: `Shoeybi et al. 2019 (arXiv 1909.08053) section 3. Megatron-LM: ...` with paths between
backticks. They are read here and nowhere written a second time; a paper's title, by which it is looked for, is in
`docs/site/papers`. Which lab builds what a file holds stands in the labs' tables *Where this lives*.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from docs.site.papers import TITLES
from docs.site.reference import HEAD, Module, escaped

_ARXIV = re.compile(r"\b(\d{4}\.\d{4,5})\b")
_PATH = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.py|megatron/[\w/]+)`")
_PLACE = re.compile(
    r"[,)]* *((?:sections?|figures?|tables?|appendix|equations?) \w+(?:\.\d+)*(?:(?: and| to|,) \d+(?:\.\d+)*)*)"
)
# Megatron-LM's root, and how docstrings write it without its first folders.
_ROOTS = ("megatron/", "examples/", "tools/", "pretrain_", "tests/")
_OUTER = ("core/", "training/", "rl/", "post_training/")


@dataclass(frozen=True)
class Sources:
    """What a module names as its sources.

    Attributes:
        megatron: files and folders of Megatron-LM, from its root.
        papers: numbers of arXiv, with the sections and figures that are named.
    """

    megatron: tuple[str, ...]
    papers: dict[str, str]


def sources(lecture: str, ours: set[str], folder: str = "") -> Sources:
    """Read the sources from a lecture; `ours` are the paths of this repository, `folder` is the module's."""
    text = " ".join(lecture.split())
    return Sources(tuple(_megatron(text, ours, folder)), _papers(text))


def _megatron(text: str, ours: set[str], here: str) -> list[str]:
    """Paths of Megatron-LM that a text names, each from its root.

    `router.py`, `moe_utils.py` in `megatron/core/transformer/moe` are two files; a name without a folder is in the
    folder that follows with `in`, or in that of the file before it.
    """
    found, folder = list[str](), ""
    begin = max(text.find("Megatron-LM:"), text.find("In Megatron-LM"))
    begin = begin if begin >= 0 else text.find("Megatron-LM")
    others = re.compile(r"TRL:|Transformer Engine(?: \(|:)").search(text, max(begin, 0))
    for match in _PATH.finditer(text, begin, others.start() if others else len(text)) if begin >= 0 else ():
        path = match[1].rstrip("/")
        path = f"megatron/{path}" if path.startswith(_OUTER) else path
        neighbour = not folder and f"{here}/{path}" in ours and not path.startswith(_ROOTS)
        if path in ours or f"minimegatron/{path}" in ours or neighbour:
            continue
        if path.startswith("megatron/") and not path.endswith(".py") and text[: match.start()].endswith(" in "):
            continue  # the folder of the names before it
        if not path.startswith(_ROOTS):
            behind = re.match(r"(?:[^.;:]|\.(?:py|cpp)\b)*? in `(megatron/[\w/]+?)/?`", text[match.end() :])
            folder = behind[1] if behind and ".py" not in behind[1] else folder or "megatron/core"
            path = f"megatron/core/{path}" if "/" in path else f"{folder}/{path}"
        if path.endswith(".py"):
            folder = path.rpartition("/")[0]
        if path not in found:
            found.append(path)
    return found


def _papers(text: str) -> dict[str, str]:
    """Number of arXiv -> the sections and figures that are named with it."""
    found = dict[str, str]()
    for match in _ARXIV.finditer(text):
        place = _PLACE.match(text, match.end())
        said = place[1] if place else ""
        found[match[1]] = "; ".join(dict.fromkeys(filter(None, (found.get(match[1], ""), said))))
    return found


def names_of_papers(texts: Iterable[str]) -> dict[str, str]:
    """Number of arXiv -> whose paper it is and from when, as most texts say it: what stands before the number."""
    said = defaultdict[str, Counter[str]](Counter)
    for text in (" ".join(text.split()) for text in texts):
        for match in _ARXIV.finditer(text):
            before = re.sub(r"[\s(,:]*(?:arXiv[ :]?)?$", "", text[max(0, match.start() - 100) : match.start()])
            before = re.sub(r" \(arXiv \d{4}\.\d{4,5}$", "", before)  # (arXiv A, B): both are theirs
            before = re.split(r"[;|:)],? |(?<!\bal)(?<!Dr)[.] | and (?=[A-Z]\w+ et al)| \((?=[A-Z]\w+ et al)", before)[
                -1
            ]
            name = re.sub(r"^(?:Papers?|See|In|and) |^\(|\*|,? for .*", "", before)
            name = name.replace(" (", ", ").replace(",,", ",")
            if re.fullmatch(r"[A-Z][\w&,.’' -]{2,60}", name) and (re.search(r"\d{4}|et al", name) or len(name) < 20):
                dated = name if re.search(r"\d{4}", name) or "et al" not in name else f"{name} 20{match[1][:2]}"
                said[match[1]][dated] += 1
    return {number: max(counts, key=lambda name: (counts[name], len(name))) for number, counts in said.items()}


def labs_of(labs: dict[str, str], ours: set[str]) -> dict[str, list[str]]:
    """Path of a module -> the labs whose section *Where this lives* names it."""
    found = defaultdict[str, list[str]](list)
    for name, text in labs.items():
        for path in re.findall(r"`((?:\w+/)+\w+\.py)`", text.rpartition("\n## Where this lives\n")[2]):
            if f"minimegatron/{path}" in ours and name not in found[f"minimegatron/{path}"]:
                found[f"minimegatron/{path}"].append(name)
    return found


# ---------------------------------------------------------------------------------------------- the page


class Words(NamedTuple):
    """What the page says beside its rows, in a language.

    Attributes:
        title: of the page.
        told: below it.
        paper, megatron, here: of a table: its heading, what is said of it, and the heads of its columns.
        outside: where a file is that is in no folder.
        lab: the word.
    """

    title: str
    told: str
    paper: tuple[str, str, str]
    megatron: tuple[str, str, str]
    here: tuple[str, str, str]
    outside: str
    lab: str


WORDS = {
    "en": Words(
        "Papers, Megatron-LM and this package",
        "Three tables, made from the lectures at the top of the files: from a paper to the files that implement it, "
        "from a file of Megatron-LM to ours, and from ours to both. A method that you know by name, `zigzag` or "
        "`ZB-H1`: the search (Ctrl K) finds the place. [中文](zh/map.md)",
        ("From a paper", "", "| paper | files (and where in the paper) | labs |"),
        (
            "From Megatron-LM",
            "Paths are those of Megatron-LM's repository, below `megatron/core` of the version that tests compare with "
            "(VERSION). What it has and this package has not is not in the table.",
            "| Megatron-LM | here |",
        ),
        ("From this package", "", "| file | Megatron-LM | papers | labs |"),
        "the root",
        "lab",
    ),
    "zh": Words(
        "论文、Megatron-LM 与这个包",
        "三张表，由各个文件开头的说明生成：从一篇论文到实现它的文件，从 Megatron-LM 的一个文件到我们的文件，"
        "再从我们的文件到两者。文件的说明和论文的标题是英文。你知道名字的方法，比如 `zigzag` 或 `ZB-H1`，"
        "用搜索（Ctrl K）就能找到位置。[English](../map.md)",
        ("从论文出发", "", "| 论文 | 文件（以及论文里的位置） | 实验 |"),
        (
            "从 Megatron-LM 出发",
            "路径都相对于 Megatron-LM 仓库；`megatron/core` 之下，以测试所对照的版本（VERSION）为准。"
            "它有而这个包没有的，不在表里。",
            "| Megatron-LM | 这里 |",
        ),
        ("从这个包出发", "", "| 文件 | Megatron-LM | 论文 | 实验 |"),
        "根目录",
        "实验",
    ),
}


def page(modules: list[Module], labs: dict[str, str], root: Path, language: str = "en") -> str:
    """The page, as Markdown, in a language of `WORDS`; one in another language than English lies in a folder."""
    ours = {str(path.relative_to(root)) for path in (root / "minimegatron").rglob("*.py")}
    said = {
        module: sources(module.lecture, ours, str(module.path.parent))
        for module in modules
        if module.name.startswith("minimegatron")
    }
    texts = [module.lecture for module in modules]
    names, built = names_of_papers([*texts, *labs.values()]), labs_of(labs, ours)
    lab_papers = {name: _papers(" ".join(text.split())) for name, text in labs.items()}
    words = WORDS[language]
    lines = [f"# {words.title}", "", words.told]
    for (heading, told, _), rows in (
        (words.paper, _by_paper(said, names, lab_papers, words)),
        (words.megatron, _by_megatron(said, words)),
        (words.here, _by_file(said, names, built, words)),
    ):
        lines += ["", f"## {heading}", "", *([told.replace("VERSION", _version(root)), ""] if told else []), *rows]
    text = "\n".join(lines)
    return HEAD + (text if language == "en" else text.replace("](api/", "](../api/"))


def _table(head: str, rows: Iterable[str]) -> list[str]:
    return [head, re.sub(r"[^|]+", "---", head), *rows, ""]


def _version(root: Path) -> str:
    """The pin of megatron-core."""
    return " ".join(re.findall(r"^(megatron-core)==(\S+)", (root / "constraints.txt").read_text(), re.M)[0])


def _link(module: Module) -> str:
    return f"[{module.shown}]({module.page})"


def _lab(name: str, lab: str) -> str:
    return f"[{lab} {name[:2]}](labs/{name}.ipynb)"


def _paper(number: str, names: dict[str, str]) -> str:
    return f"[{', '.join(filter(None, (names.get(number), number)))}](https://arxiv.org/abs/{number})"


def _by_paper(
    said: dict[Module, Sources], names: dict[str, str], lab_papers: dict[str, dict[str, str]], words: Words
) -> list[str]:
    numbers = {n for found in said.values() for n in found.papers} | {n for found in lab_papers.values() for n in found}
    rows = list[str]()
    for number in sorted(numbers):
        files = [
            _link(module)
            + (f" ({found.papers[number]})" if found.papers[number] else "")
            + f": {escaped(module.sentence)}"
            for module, found in said.items()
            if number in found.papers
        ]
        taught = [_lab(name, words.lab) for name, found in lab_papers.items() if number in found]
        paper = f"{_paper(number, names)}<br>{escaped(TITLES.get(number, ''))}"
        rows.append(f"| {paper} | {'<br>'.join(files)} | {', '.join(taught)} |")
    return _table(words.paper[2], rows)


def _by_megatron(said: dict[Module, Sources], words: Words) -> list[str]:
    there = defaultdict[str, list[Module]](list)
    for module, found in said.items():
        for path in found.megatron:
            there[path].append(module)
    lines = list[str]()
    for folder, paths in groupby(
        sorted(there, key=lambda p: (p.rpartition("/")[0], p)), lambda p: p.rpartition("/")[0]
    ):
        rows = [f"| `{path.rpartition('/')[2]}` | {'<br>'.join(map(_link, there[path]))} |" for path in paths]
        lines += [f"### {folder or words.outside}", "", *_table(words.megatron[2], rows)]
    return lines


def _room(module: Module) -> str:
    """The package of the first level; none for a module beside them."""
    return module.shown.partition("/")[0] if module.is_package or "/" in module.shown else ""


def _by_file(
    said: dict[Module, Sources], names: dict[str, str], built: dict[str, list[str]], words: Words
) -> list[str]:
    lines = list[str]()
    for room, members in groupby(sorted(said, key=_room), _room):
        rows = list[str]()
        for module in members:
            found, taught = said[module], built.get(str(module.path), [])
            if not (found.megatron or found.papers or taught):
                continue
            papers = [_paper(n, names) + (f" {place}" if place else "") for n, place in found.papers.items()]
            megatron = "<br>".join(f"`{path.removeprefix('megatron/')}`" for path in found.megatron)
            rows.append(
                f"| {_link(module)}: {escaped(module.sentence)} | {megatron} | {'<br>'.join(papers)} | "
                f"{', '.join(_lab(name, words.lab) for name in taught)} |"
            )
        if rows:
            lines += [f"### {room or words.outside}", "", *_table(words.here[2], rows)]
    return lines
