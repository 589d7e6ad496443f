"""Our file, Megatron-LM's, the paper, the lab: one page in every direction, made from docstrings.

A lecture ends with its sources: `Shoeybi et al. 2019 (arXiv 1909.08053) section 3. Megatron-LM: ...` with paths between
backticks. They are read here and nowhere written a second time. Which lab builds what a file holds stands in the labs'
tables *Where this lives*.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from docs.site.reference import HEAD, Module, escaped
from labkit.explain import title_of

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
        if path in ours or f"minimegatron/{path}" in ours or (not folder and f"{here}/{path}" in ours):
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
            before = re.split(r"[;|:)],? |(?<!\bal)(?<!Dr)[.] | and (?=[A-Z]\w+ et al)| \((?=[A-Z]\w+ et al)", before)[
                -1
            ]
            name = re.sub(r"^(?:Papers?|See|In) |\*|,? for .*", "", before).replace(" (", ", ").replace(",,", ",")
            if re.fullmatch(r"[A-Z][\w&,.’' -]{2,60}", name) and (re.search(r"\d{4}|et al", name) or len(name) < 20):
                said[match[1]][name] += 1
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


def page(modules: list[Module], labs: dict[str, str], root: Path) -> str:
    """The page, as Markdown."""
    ours = {str(path.relative_to(root)) for path in (root / "minimegatron").rglob("*.py")}
    said = {
        module: sources(module.lecture, ours, str(module.path.parent))
        for module in modules
        if module.name.startswith("minimegatron")
    }
    texts = [module.lecture for module in modules]
    names, built = names_of_papers([*texts, *labs.values()]), labs_of(labs, ours)
    lab_papers = {name: _papers(" ".join(text.split())) for name, text in labs.items()}
    return HEAD + "\n".join(
        [
            "# Papers, Megatron-LM and this package",
            "",
            "Three tables, made from the lectures at the top of the files: from a paper to the files that implement "
            "it, from a file of Megatron-LM to ours, and from ours to both.",
            "",
            "## From a paper",
            "",
            *_by_paper(said, names, lab_papers, labs),
            "## From Megatron-LM",
            "",
            "Paths are those of Megatron-LM's repository. What it has and this package has not is not in the table.",
            "",
            *_by_megatron(said),
            "## From this package",
            "",
            *_by_file(said, names, built, labs),
        ]
    )


def _table(head: str, rows: Iterable[str]) -> list[str]:
    return [head, re.sub(r"[^|]+", "---", head), *rows, ""]


def _link(module: Module) -> str:
    return f"[{module.shown}]({module.page})"


def _lab(name: str, labs: dict[str, str]) -> str:
    return f"[{title_of(labs[name]).partition(' · ')[0].lower()}](labs/{name}.ipynb)"


def _paper(number: str, names: dict[str, str]) -> str:
    return f"[{names.get(number, 'arXiv')}, {number}](https://arxiv.org/abs/{number})"


def _by_paper(
    said: dict[Module, Sources], names: dict[str, str], lab_papers: dict[str, dict[str, str]], labs: dict[str, str]
) -> list[str]:
    numbers = {n for found in said.values() for n in found.papers} | {n for found in lab_papers.values() for n in found}
    rows = list[str]()
    for number in sorted(numbers):
        files = [
            _link(module) + (f" ({found.papers[number]})" if found.papers[number] else "")
            for module, found in said.items()
            if number in found.papers
        ]
        taught = [_lab(name, labs) for name, found in lab_papers.items() if number in found]
        rows.append(f"| {_paper(number, names)} | {'<br>'.join(files)} | {', '.join(taught)} |")
    return _table("| paper | files (and where in the paper) | labs |", rows)


def _by_megatron(said: dict[Module, Sources]) -> list[str]:
    there = defaultdict[str, list[Module]](list)
    for module, found in said.items():
        for path in found.megatron:
            there[path].append(module)
    lines = list[str]()
    for folder, paths in groupby(
        sorted(there, key=lambda p: (p.rpartition("/")[0], p)), lambda p: p.rpartition("/")[0]
    ):
        rows = [f"| `{path.rpartition('/')[2]}` | {'<br>'.join(map(_link, there[path]))} |" for path in paths]
        lines += [f"### {folder or 'the root'}", "", *_table("| Megatron-LM | here |", rows)]
    return lines


def _room(module: Module) -> str:
    """The package of the first level; none for a module beside them."""
    return module.shown.partition("/")[0] if module.is_package or "/" in module.shown else ""


def _by_file(
    said: dict[Module, Sources], names: dict[str, str], built: dict[str, list[str]], labs: dict[str, str]
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
                f"{', '.join(_lab(name, labs) for name in taught)} |"
            )
        if rows:
            lines += [
                f"### {room or 'the root'}",
                "",
                *_table("| file | Megatron-LM | papers | labs |", rows),
            ]
    return lines
