"""All pages of the site, as text, before Sphinx reads them.

A document has the place that it has in the repository, so its links to other documents and pictures are right as they
are. A link to a module becomes one to its page of the reference, and any other file or folder that a page links to gets
a page with its text.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from docs.site import counterparts, questions, reference
from docs.site.reference import Module
from labkit import explain
from minimegatron.commands import prose

_LINK = re.compile(r"(?<=\]\()([^()\s#]+)((?:#[^()\s]*)?)(?=\))")
_FENCE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.M | re.S)
_LANGUAGES = {
    **{".py": "python", ".sh": "bash", ".sbatch": "bash", ".toml": "toml", ".yml": "yaml", ".cu": "cuda"},
    **{".h": "cpp", ".ipynb": "json", ".cfg": "ini"},
}


PLAN = "docs/reading_plan.md"


def pages(root: Path) -> dict[str, str | bytes]:
    """Path below the source folder -> content, of every page and picture of the site."""
    modules = reference.modules(root)
    labs = {source.parent.name: explain.markdown_of(source) for source in sorted(root.glob("course/*/lab.py"))}
    made: dict[str, str | bytes] = {
        str(path.relative_to(root)): path.read_text()
        for path in [*root.glob("*.md"), *(root / "docs").glob("*.md"), root / "benchmarks" / "RECORDS.md"]
    }
    made |= {path.name: path.read_text() for path in (root / "docs" / "site").glob("*.md")}
    made["docs/glossary.md"] = _glossary(str(made["docs/glossary.md"]))
    made |= reference.pages(modules)
    made["api/index.md"] = _api(modules)
    made["map.md"], made["zh/map.md"] = (counterparts.page(modules, labs, root, language) for language in ("en", "zh"))
    made["questions.md"], made["zh/questions.md"] = (questions.page(language, list(labs)) for language in ("en", "zh"))
    made["labs/index.md"], made["solutions/index.md"] = _labs(labs, str(made["README.md"])), _solutions(labs)
    for name in labs:
        made |= _notebooks(root, name)
    for name in ("README.zh.md", PLAN.replace(".md", ".zh.md")):
        made[name] = _chinese(str(made[name]), "../" * name.count("/"))
    pages = [
        "docs/reading_plan.zh",
        "zh/questions",
        "论文与 Megatron-LM <zh/map>",
        *(f"zh/labs/{name}" for name in labs),
    ]
    made["README.zh.md"] = str(made["README.zh.md"]) + tree(pages)
    for name in (PLAN, PLAN.replace(".md", ".zh.md")):
        made[name] = _with_sections(str(made[name]), name, made)
    for name, title in (
        ("README.md", "Start"),
        ("README.zh.md", "从这里开始"),
    ):  # the first page has the project's name
        made[name] = re.sub("^# minimegatron$", f"# {title}", str(made[name]), count=1, flags=re.M)
    _turn_links(made, root, {str(module.path): module.page for module in modules})
    for picture in (root / "docs" / "images").iterdir():
        made[f"docs/images/{picture.name}"] = picture.read_bytes()
    return made


def write(made: dict[str, str | bytes], folder: Path) -> bool:
    """Write what differs from what is there, so that Sphinx reads nothing else again, and remove what is no page.

    Returns:
        Whether something was removed.
    """
    gone = [path for path in folder.rglob("*") if path.is_file() and str(path.relative_to(folder)) not in made]
    for path in gone:
        path.unlink()
    for name, content in made.items():
        path, raw = folder / name, content.encode() if isinstance(content, str) else content
        if not path.exists() or path.read_bytes() != raw:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
    return bool(gone)


# ---------------------------------------------------------------------------------------------- notebooks


def _notebooks(root: Path, name: str) -> dict[str, str]:
    """The pages of a lab: as it is shipped, with its solutions, and with its Chinese prose; each names the others."""
    lab, solution = (json.loads((root / folder / f"{name}.ipynb").read_text()) for folder in ("labs", "solutions"))
    chinese = copy.deepcopy(lab)
    said = prose.pairs(lab, root / "course" / name / "zh.md")
    prose.switch(chinese, [said], said)
    for cell in chinese["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = in_prose("".join(cell["source"]), _joined)
    return {
        f"labs/{name}.ipynb": _shown(
            lab,
            f"The lab before anything is done. To work in it: `make lab`, and open `my-labs/{name}.ipynb`. When you "
            f"are done: [the solution](../solutions/{name}.ipynb). [中文](../zh/labs/{name}.ipynb)",
        ),
        f"solutions/{name}.ipynb": _shown(
            solution, f"With its solutions. [The lab without them](../labs/{name}.ipynb).", "Solution of lab"
        ),
        f"zh/labs/{name}.ipynb": _shown(
            chinese,
            f"还没有做过任何练习的实验。要动手做：`make lab LANGUAGE=zh`，然后打开 `my-labs/{name}.ipynb`。做完之后："
            f"[答案](../../solutions/{name}.ipynb)。图里的文字，以及这里已有的输出，仍是英文。[English](../../labs/{name}.ipynb)",
            note="说明",
        ),
    }


def _shown(notebook: Any, words: str, title: str = "Lab", note: str = "Note") -> str:
    """A notebook as a page: outputs as they are, folded cells folded, one title, and a note below it.

    Args:
        notebook: as JSON has it.
        words: of the note.
        title: in place of the word Lab, so that a search finds no two pages of one name.
        note: its title.
    """
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            cell["metadata"].setdefault("tags", []).append("hide-input")
    _outline([cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"])
    notebook["cells"][0]["source"] = re.sub("^# Lab", f"# {title}", notebook["cells"][0]["source"])
    text = f"```{{admonition}} {note}\n:class: note\n\n{words}\n```"
    notebook["cells"].insert(1, {"cell_type": "markdown", "id": "of-the-site", "metadata": {}, "source": text})
    notebook["metadata"]["language_info"]["pygments_lexer"] = "lab"
    return json.dumps(notebook, indent=1, ensure_ascii=False)


def _outline(cells: list[Any]) -> None:
    """One title a page: where a lab's parts have headings of that level, all headings but the title sink by one."""
    if sum(cell["source"].startswith("# ") for cell in cells) > 1:
        for cell in cells[1:]:
            cell["source"] = in_prose(cell["source"], lambda text: re.sub(r"^(#+ )", r"#\1", text, flags=re.M))


# ------------------------------------------------------------------------------------------------- lists


def tree(names: Iterable[str]) -> str:
    """The pages below a page, which the theme shows in its sidebar."""
    return "\n```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"


def _chinese(text: str, root: str) -> str:
    """A Chinese document: its marks as anchors, which no other page has, and links to what is there in Chinese.

    Args:
        text: of the document.
        root: the way from it to the root, "" or "../".
    """
    text = re.sub(r'<a id="[^"]+"></a>', "", text)  # GitHub's, beside the marks
    more = f"[面试问题和答案]({root}zh/questions.md) · [论文与 Megatron-LM]({root}zh/map.md)"
    text = re.sub(r"^(\[English\].*)$", rf"\1 · {more}", text, count=1, flags=re.M)
    text = re.sub(r"^<!-- section (\S+) \w+ -->\n", r"(zh-\1)=\n", text, flags=re.M)
    for link, chinese in (
        ("#", "#zh-"), (f"{root}labs/", f"{root}zh/labs/"), (f"{root}README.md#", f"{root}README.zh.md#zh-"),
        ("docs/reading_plan.md", "docs/reading_plan.zh.md"),
    ):  # fmt: skip
        text = text.replace(f"]({link}", f"]({chinese}")
    return in_prose(text, _joined)


def _with_sections(plan: str, page: str, made: dict[str, str | bytes]) -> str:
    """A plan in which the headings behind a lab, `[lab 03](...), *ZB-H1*`, are links to these sections of it."""

    def linked(lab: re.Match[str]) -> str:
        name = os.path.normpath(os.path.join(os.path.dirname(page), lab[1]))
        cells = json.loads(made[name])["cells"]
        text = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
        headings = re.findall(r"^#+ +(.*?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)

        def section(said: re.Match[str]) -> str:
            heading = next((heading for heading in headings if heading.endswith(said[1])), None)
            return f"[{said[0]}]({lab[1]}#{slug(heading)})" if heading else said[0]

        return lab[0][: -len(lab[2])] + re.sub(r"\*([^*]+)\*", section, lab[2]) if lab[2] else lab[0]

    return re.sub(r"\]\(((?:\.\./)+(?:zh/)?labs/\w+\.ipynb)\)([^|;\[]*)", linked, plan)


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _joined(text: str) -> str:
    """Chinese without the blanks that a browser would put between its lines, or behind a mark."""
    first, *rest = text.split("\n")
    lines = [first]
    for line in rest:
        behind_a_mark = re.search("^(?!#).*[，。、；：？！）]$", lines[-1]) and re.match(" *[A-Za-z\\[]", line)
        if behind_a_mark or (
            re.search(f"^(?!#).*{explain.CHINESE}$", lines[-1]) and re.match(f" *{explain.CHINESE}", line)
        ):
            lines[-1] += line.lstrip(" ")
        else:
            lines.append(line)
    return "\n".join(lines)


def _labs(labs: dict[str, str], readme: str) -> str:
    """The labs and what is built in each: the README's own section."""
    (section,) = re.findall(r"^## The labs\n(.*?)^## ", readme, re.M | re.S)
    section = re.sub(r"\]\((?!#)", "](../", section)
    return f"# Labs\n{section}" + tree([*labs, "../solutions/index"])


def _solutions(labs: dict[str, str]) -> str:
    words = (
        "Each lab with its exercises done, and the outputs of a run. A lab teaches more to those who open its solution "
        "last."
    )
    links = "\n".join(f"- [{explain.title_of(text)}]({name}.ipynb)" for name, text in labs.items())
    return f"# Solutions\n\n{words}\n\n{links}\n" + tree(labs)


def _api(modules: list[Module]) -> str:
    """The reference's first page: the packages of both parts, each with its sentence."""
    words = (
        "A page for each module: its lecture, its public names with their signatures, and its source, all taken from "
        "the sources. [Papers and Megatron-LM's files](../map.md) lead here as well."
    )
    parts = [f"{reference.HEAD}# Reference", words]
    for top in reference.PACKAGES:
        inside = [m for m in modules if m.name == top or (m.name.startswith(f"{top}.") and m.name.count(".") == 1)]
        inside.sort(key=lambda m: (not m.is_package, m.name))
        lines = [f"- [{m.shown}]({m.page.removeprefix('api/')}): {reference.escaped(m.sentence)}" for m in inside[1:]]
        parts += [f"## {top}", reference.escaped(inside[0].sentence), "\n".join(lines)]
    return "\n\n".join(parts) + "\n" + tree(f"{top}/index" for top in reference.PACKAGES)


def _glossary(text: str) -> str:
    """Terms as Sphinx's glossary: each can be linked to and is found by the search."""

    def terms(match: re.Match[str]) -> str:
        entries = re.findall(r"^- \*\*(.+?)\*\*: (.*(?:\n  .*)*)", match[0], re.M)
        lines = [f"{term}\n  " + " ".join(said.split()) for term, said in entries]
        return "`````{glossary}\n" + "\n\n".join(lines) + "\n`````\n"

    return re.sub(r"(?:^- \*\*.*\n(?:  .*\n)*)+", terms, text, flags=re.M)


# ------------------------------------------------------------------------------------------------- links


def _turn_links(made: dict[str, str | bytes], root: Path, of_module: dict[str, str]) -> None:
    """Turn links to files that are no pages; pages of files are added, and their links turned as well."""
    left = [name for name in made if name.endswith(".md") and not name.startswith("api/minimegatron/")]
    while left:
        page = left.pop()

        def turned(link: re.Match[str], page: str = page) -> str:
            if re.match(r"[a-z]+:", link[1]):
                return link[0]
            target = os.path.normpath(os.path.join(os.path.dirname(page), link[1]))
            if target in made or target.startswith("docs/images/"):
                return link[0]
            goal = of_module.get(target)
            if goal is None and (root / target).exists():
                goal = f"files/{target}.md"
                if goal not in made:
                    made[goal] = _file(root / target, target)
                    left.append(goal)
            return os.path.relpath(goal, os.path.dirname(page) or ".") + link[2] * (goal == target) if goal else link[0]

        made[page] = in_prose(str(made[page]), lambda text: _LINK.sub(turned, text))


def in_prose(text: str, change: Callable[[str], str]) -> str:
    """Change a Markdown text outside of its code."""
    parts = _FENCE.split(text)
    parts[::2] = map(change, parts[::2])
    return "".join(parts)


def _file(path: Path, name: str) -> str:
    """The page of a file, with its text; of a folder, with links to its files."""
    if path.is_dir():
        inside = sorted(p for p in path.iterdir() if p.is_file() and p.suffix in _LANGUAGES and p.name != "__init__.py")
        up = "../" * (name.count("/") + 1)
        return (
            f"---\norphan: true\n---\n\n# {name}\n\n"
            + "\n".join(f"- [{p.name}]({up}{name}/{p.name})" for p in inside)
            + "\n"
        )
    language = _LANGUAGES.get(path.suffix, "text")
    return f"---\norphan: true\n---\n\n# {name}\n\n``````{{code-block}} {language}\n{path.read_text()}``````\n"


def links(text: str) -> Iterator[tuple[str, str]]:
    """(path, anchor with its #) of every link of a Markdown text, outside of code."""
    for part in _FENCE.split(text)[::2]:
        yield from _LINK.findall(part)
