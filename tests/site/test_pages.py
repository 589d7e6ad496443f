"""The generators of the website: what its pages say, and that all of them are reached. Nothing is built.

The whole build is in `test_build.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from course.quiz import QUESTIONS
from docs.site import counterparts, pages, reference
from docs.site.papers import TITLES
from labkit import explain
from labkit.cards import cards

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made() -> dict[str, str | bytes]:
    return pages.pages(ROOT)


def texts(made: dict[str, str | bytes]) -> dict[str, str]:
    """Page -> its Markdown; of a notebook that of its text cells."""
    found = {}
    for name, content in made.items():
        if name.endswith(".ipynb"):
            cells = json.loads(content)["cells"]
            found[name] = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        elif isinstance(content, str):
            found[name] = content
    return found


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ +(.*?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    labels = set(re.findall(r"^\(([\w-]+)\)=$", text, re.M))
    return {pages.slug(heading) for heading in headings} | labels


def leads(page: str, text: str) -> Iterator[tuple[str, str]]:
    """(page or picture, anchor) to which a page's links inside the site lead; trees count as links."""
    targets = list(pages.links(text))
    for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.M | re.S):
        entries = [re.sub(r".*<(.*)>", r"\1", line) for line in tree.splitlines() if line and line[0] != ":"]
        targets += [(entry, "") for entry in entries]
    for target, anchor in targets:
        if not re.match(r"[a-z]+:", target):
            yield os.path.normpath(os.path.join(os.path.dirname(page), target)), anchor


def resolved(target: str, made: dict[str, str | bytes]) -> str | None:
    """The page that a link or an entry of a tree names."""
    return next((name for end in ("", ".md", ".ipynb") if (name := target + end) in made), None)


def test_every_link_between_pages_leads_to_a_page_and_a_heading(made: dict[str, str | bytes]) -> None:
    said = texts(made)
    broken = []
    for page, text in said.items():
        for target, anchor in leads(page, text):
            name = resolved(target, made)
            if name is None or (anchor and anchor[1:] not in anchors(said[name])):
                broken.append((page, target + anchor))
    assert not broken


def test_three_clicks_from_the_first_page(made: dict[str, str | bytes]) -> None:
    said = texts(made)
    away, rim = {"index.md": 0}, ["index.md"]
    for clicks in (1, 2, 3):
        reached = {resolved(target, made) for page in rim for target, _ in leads(page, said.get(page, ""))}
        rim = sorted(page for page in reached - set(away) if page)
        away |= dict.fromkeys(rim, clicks)
    assert away["README.md"] == away["questions.md"] == away["map.md"] == away["docs/reading_plan.md"] == 1
    labs = [name for name in made if re.match(r"labs/\d", name)]
    assert len(labs) >= 13 and max(away[name] for name in labs) <= 2
    implementing = {name for name in away if name.startswith("api/minimegatron/") and f"({name})" in said["map.md"]}
    assert len(implementing) > 100 and max(away[name] for name in implementing) <= 2
    far = [name for name in made if isinstance(made[name], str) and name not in away]
    assert all(name.startswith(("api/", "files/")) for name in far), far


def test_every_module_has_a_page_in_a_tree(made: dict[str, str | bytes]) -> None:
    modules = reference.modules(ROOT)
    assert {module.page for module in modules} <= set(made) and len(modules) > 400
    trees = {
        resolved(target, made)
        for page, text in texts(made).items()
        for target, _ in leads(page, "".join(re.findall(r"^```\{toctree\}\n.*?^```", text, re.M | re.S)))
    }
    pages_of_trees = {name for name in made if isinstance(made[name], str) and not name.startswith("files/")}
    assert pages_of_trees - trees == {"index.md"}, "a new document has its place in docs/site/guides.md"


# ---------------------------------------------------------------------------------------------- the reference

SOURCE = '''"""One line: 2*cp ranks.

A block::

    a*b <c>

`p<q` and x<y.

| a    | b |
|------|---|
| `c|d` | e |
"""

from typing import overload


@dataclasses.dataclass
class Row(Base):
    """A row.

    Attributes:
        told: here.
    """

    told: int
    size: int = 3  # of it
    flag: bool = opt(MODEL, True, "its *.help.*")
    _own: int = 0

    @property
    def whole(self) -> int:
        """All."""

    @classmethod
    def of(cls, *parts: int) -> "Row": ...

    def _hidden(self): ...


@overload
def f(x: int) -> int: ...
def f(x, *, y: str = "a*b"):
    """F.

    Args:
        x: first,
            and more.
        y: second.

    Raises:
        ConfigError: it is <wrong>.
    """


def _private(): ...


# How many: a*b
# of them.
MANY = 3
LONG = {"a": 1}  # what <it> is
UNTOLD = 4
'''


def test_the_page_of_a_module() -> None:
    module = reference.Module(Path("minimegatron/comm/thing.py"), SOURCE)
    assert (module.name, module.shown) == ("minimegatron.comm.thing", "comm/thing")
    assert module.page == "api/minimegatron/comm/thing.md" and module.sentence == "One line: 2*cp ranks."
    (page,) = reference.pages([module]).values()
    assert "# comm/thing" in page and 'href="../../../_modules/minimegatron/comm/thing.html"' in page
    assert "One line: 2\\*cp ranks." in page and "A block:\n\n    a*b <c>" in page
    assert "`p<q` and x\\<y." in page and "| `c\\|d` | e |" in page
    assert "{py:class} Row\n" in page and "Bases: `Base`" in page and "- `told`: here." in page
    assert "{py:attribute} told" not in page and "_own" not in page
    assert "{py:attribute} size\n:type: int\n:value: 3\n\nof it" in page
    assert "{py:attribute} flag\n:type: bool\n:value: True\n\nits \\*.help.\\*" in page
    assert "{py:property} whole\n:type: int\n\nAll." in page
    assert "{py:method} of(*parts: int) -> 'Row'\n:classmethod:" in page and "_hidden" not in page
    assert page.count("{py:function} f(") == 1 and "{py:function} f(x, *, y: str='a*b')" in page
    assert "**Args**\n\n- `x`: first, and more.\n- `y`: second." in page
    assert "**Raises**\n\n- `ConfigError`: it is \\<wrong>." in page and "_private" not in page
    assert "{py:data} MANY\n:value: 3\n\nHow many: a\\*b of them." in page and "UNTOLD" not in page
    assert "{py:data} LONG\n:value: {'a': 1}\n\nwhat \\<it> is" in page


# ------------------------------------------------------------------------------------------------ the map


@pytest.mark.parametrize(
    "lecture, megatron",
    [
        ("Megatron-LM: `megatron/core/a.py`, `b.py`.", ["megatron/core/a.py", "megatron/core/b.py"]),
        ("In Megatron-LM: `a.py` and `b.cpp` in `megatron/core/d`.", ["megatron/core/d/a.py"]),
        ("Megatron-LM: `f` in `transformer/moe/x.py`, called in `core/y.py`.",
         ["megatron/core/transformer/moe/x.py", "megatron/core/y.py"]),
        ("See `comm/mesh.py`. Megatron-LM: `training/a.py`; here `comm/mesh.py`. TRL: `trl/t.py`.",
         ["megatron/training/a.py"]),
        ("Megatron-LM has none. `mesh.py` says more.", []),
        ("Megatron-LM: `LoraConfig` in `megatron/rl`.", []),
        ("Megatron-LM: `pretrain_gpt.py`, `tools/x.py`, `megatron/training/config`.",
         ["pretrain_gpt.py", "tools/x.py", "megatron/training/config"]),
        ("The layers of `megatron/core/a.py`.", []),
        ("Megatron-LM: `pretrain_mesh.py`.", ["pretrain_mesh.py"]),  # though a file here has that name
    ],
)  # fmt: skip
def test_paths_of_megatron_in_a_lecture(lecture: str, megatron: list[str]) -> None:
    ours = {"minimegatron/comm/mesh.py", "minimegatron/comm/pretrain_mesh.py"}
    assert list(counterparts.sources(lecture, ours, "minimegatron/comm").megatron) == megatron


def test_papers_in_a_lecture() -> None:
    text = (
        "As shown (Li et al. 2020, arXiv 2006.15704). Papers: Shoeybi et al. 2019 (arXiv 1909.08053, figure 3); "
        "Su et al. 2021\n(RoPE, 2104.09864) section 3.2. Qwen2: arXiv:2407.10671; 0.12345 is a number, and so is "
        "12345.6789."
    )
    found = counterparts.sources(text, set()).papers
    assert found == {"2006.15704": "", "1909.08053": "figure 3", "2104.09864": "section 3.2", "2407.10671": ""}
    names = counterparts.names_of_papers([text, "Liu et al. 2023 (arXiv 2304.08485, 2310.03744); others."])
    assert names == {
        "2304.08485": "Liu et al. 2023", "2310.03744": "Liu et al. 2023",
        "2006.15704": "Li et al. 2020", "1909.08053": "Shoeybi et al. 2019", "2104.09864": "Su et al. 2021, RoPE",
        "2407.10671": "Qwen2",
    }  # fmt: skip


def test_the_map_leads_in_every_direction(made: dict[str, str | bytes]) -> None:
    paper, megatron, ours = re.split(r"^## From .*$", str(made["map.md"]), flags=re.M)[1:]
    module = "[comm/collectives](api/minimegatron/comm/collectives.md)"
    shoeybi = "[Shoeybi et al. 2019, 1909.08053](https://arxiv.org/abs/1909.08053)"
    (row,) = [line for line in paper.splitlines() if line.startswith(f"| {shoeybi}<br>Megatron-LM: Training Multi-")]
    assert f"{module} (figure 3): Collectives that" in row and "labs/02_tensor_parallel.ipynb" in row
    folder = megatron.split("### megatron/core/tensor_parallel\n")[1].split("\n### ")[0]
    assert re.search(r"^\| `mappings\.py` \|.*" + re.escape(module), folder, re.M)
    (row,) = [line for line in ours.splitlines() if line.startswith(f"| {module}: ")]
    assert "`core/tensor_parallel/mappings.py`" in row and shoeybi in row and "labs/01_process_groups.ipynb" in row
    assert len(set(re.findall(r"arxiv.org/abs/([\d.]+)", paper))) > 80
    assert "[arXiv" not in paper, "the name of an archive is nobody's"
    assert len(re.findall(r"\| \[\d{4}\.", paper)) <= 8, "most papers are named by who wrote them"
    assert "[Narayanan et al., PipeDream 2018, 1806.03377]" in paper and "[Huang et al. 2018, 1811.06965]" in paper
    assert set(re.findall(r"arxiv.org/abs/([\d.]+)", str(made["map.md"]))) == set(TITLES), "docs/site/papers.py"


def test_the_map_has_every_family_of_models_and_every_lab_in_both_languages(made: dict[str, str | bytes]) -> None:
    paper, megatron, ours = re.split(r"^## From .*$", str(made["map.md"]), flags=re.M)[1:]
    files = (ROOT / "minimegatron" / "models" / "families").glob("[a-z]*.py")
    families = {path.stem for path in files if re.search(r"\bregister\($", path.read_text(), re.M)}
    shown = set(re.findall(r"^\| \[models/families/(\w+)\]", ours, re.M))
    assert len(families) >= 15 and families - shown == set(), "its lecture ends with its sources"
    for name in os.listdir(ROOT / "course"):
        assert name[0] not in "01" or (f"(labs/{name}.ipynb)" in paper and f"(labs/{name}.ipynb)" in ours), name
    for room in ("T5", "bert", "mamba", "multimodal", "vision", "gpt"):
        assert f"### megatron/core/models/{room}\n" in megatron
    chinese = re.split(r"^## 从.*$", str(made["zh/map.md"]), flags=re.M)[1:]
    for english, translated in zip((paper, megatron, ours), chinese, strict=True):
        assert english.count("\n| ") == translated.count("\n| ") and english.count("](") == translated.count("](")
    assert "](labs/13_state_space.ipynb)" in chinese[0] and "](../api/minimegatron/comm/mesh.md)" in chinese[2]


def test_the_files_of_megatron_core_are_those_of_the_version_that_is_installed(made: dict[str, str | bytes]) -> None:
    spec = importlib.util.find_spec("megatron")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("megatron-core is not installed")
    there = Path(next(iter(spec.submodule_search_locations))).parent
    said = re.split(r"^## From .*$", str(made["map.md"]), flags=re.M)[2]
    lost = []
    for folder, rows in re.findall(r"^### (megatron/core\S*)\n(.*?)(?=^###|\Z)", said, re.M | re.S):
        lost += [f"{folder}/{name}" for name in re.findall(r"^\| `([\w.]+)`", rows, re.M)
                 if not (there / folder / name).exists()]  # fmt: skip
    assert not lost


# ------------------------------------------------------------------------------ questions, glossary, notebooks


def test_every_question_of_every_lab_is_there_with_its_answer(made: dict[str, str | bytes]) -> None:
    page, chinese = str(made["questions.md"]), str(made["zh/questions.md"])
    for source in sorted(ROOT.glob("course/*/lab.py")):
        text = explain.markdown_of(source)
        section = re.split(r"^## \d+ · Explain$", text, flags=re.M)[1].split("\n## ")[0]
        found = list(explain.questions(text))
        assert len(found) == len(re.findall(r"^\d+\. \*", section, re.M)) >= 6, source
        for question in found:
            assert f"#### {question.question}\n" in page and len(question.answer) > 20, question
            assert "details>" not in question.answer
    asked = len(cards("course"))
    for text in (page, chinese):
        assert asked == text.count("<details>") == text.count("</details>") == text.count("\n#### ")
        assert text.count("\n\n**") == len(QUESTIONS) and "{" not in text
    for name in re.findall(r"\]\(labs/(\w+)\.ipynb\)", page):
        assert f"](labs/{name}.ipynb)" in chinese
    assert chinese.count("\n## ") == 3 and len(re.findall(r"\n#### .*[一-鿿]", chinese)) == asked


def test_terms_of_the_glossary_can_be_linked_to(made: dict[str, str | bytes]) -> None:
    written = re.findall(r"^- \*\*(.+?)\*\*: ", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert len(written) > 60 and len(written) == len(set(written))
    assert re.findall(r"^(\w.*)\n  \S", str(made["docs/glossary.md"]), re.M) == written


def test_a_reading_plan_of_seven_phases() -> None:
    text = (ROOT / "docs" / "reading_plan.md").read_text()
    phases = re.split(r"^## Phase (\d): ", text, flags=re.M)[1:]
    assert phases[::2] == [*"1234567"]
    for number, phase in zip(phases[::2], phases[1::2], strict=True):
        steps = re.findall(rf"^\| {number}\.(\d) \|(.*)\|(.*)\|(.*)\|$", phase, re.M)
        assert [int(step[0]) for step in steps] == [*range(1, len(steps) + 1)] and len(steps) >= 4
        assert all("](" in opens or "`minimegatron" in opens for _, _, opens, _ in steps)
    headings = {
        name: anchors(explain.markdown_of(ROOT / "course" / name / "lab.py"))
        for name in os.listdir(ROOT / "course")
        if name[0] in "01"
    }
    for lab, said in re.findall(r"\(\.\./labs/(\w+)\.ipynb\), ([^|]*)", text):
        for heading in re.findall(r"\*([^*]+)\*", said.split(";")[0]):
            assert any(have.endswith(pages.slug(heading)) for have in headings[lab]), (lab, heading)


def test_a_question_leads_to_the_section_that_answers_it(made: dict[str, str | bytes]) -> None:
    """In both languages; that each of these sections is there, a test of all links says."""
    rows = []
    for name, asked in (
        ("docs/reading_plan.md", "A question of your own"),
        ("docs/reading_plan.zh.md", "你自己的问题"),
    ):
        table = re.split(rf"^## {asked}$", str(made[name]), flags=re.M)[1].split("\n## ")[0]
        rows.append(re.findall(r"^\| (?!you ask|你问|-)(.*) \|$", table, re.M))
        assert all("ipynb#" in row for row in rows[-1]) and "](../api/minimegatron/layers/recompute.md)" in table
        plain = re.sub(r"\[\*[^*]+\*\]", "", table)
        assert "*" not in plain, "a heading that its lab has not"
    assert len(rows[0]) == len(rows[1]) >= 13
    assert any("idle" in row and "labs/03_pipeline_1f1b.ipynb#time-against-memory" in row for row in rows[0])
    assert any("空闲" in row and "zh/labs/03_pipeline_1f1b.ipynb#时间与内存的取舍" in row for row in rows[1])


def test_notebooks_keep_their_outputs_and_say_where_else_to_read(made: dict[str, str | bytes]) -> None:
    for folder, other, title in (("labs", "solutions", "# Lab 02"), ("solutions", "labs", "# Solution of lab 02")):
        stored = json.loads((ROOT / folder / "02_tensor_parallel.ipynb").read_text())["cells"]
        shown = json.loads(made[f"{folder}/02_tensor_parallel.ipynb"])["cells"]
        code = [["".join(c["source"]), c["outputs"]] for c in stored if c["cell_type"] == "code"]
        assert [[c["source"], c["outputs"]] for c in shown if c["cell_type"] == "code"] == code
        assert shown[0]["source"].startswith(title) and f"(../{other}/02_tensor_parallel.ipynb)" in shown[1]["source"]
        folded = [c for c in shown if c["metadata"].get("jupyter", {}).get("source_hidden")]
        assert folded and all("hide-input" in c["metadata"]["tags"] for c in folded)
        titles = [
            line
            for c in shown
            if c["cell_type"] == "markdown"
            for line in c["source"].splitlines()
            if line.startswith("# ")
        ]
        assert len(titles) == 1, "its parts are sections"


def test_labs_are_there_in_chinese_with_the_same_code(made: dict[str, str | bytes]) -> None:
    readme = str(made["README.zh.md"])
    assert (
        "<!--" not in readme and "<a id" not in readme and "(zh-the-spine)=" in readme and "](#zh-the-spine)" in readme
    )
    for lab in sorted(name for name in made if re.match(r"labs/\d", name)):
        english, chinese = (json.loads(made[name])["cells"] for name in (lab, f"zh/{lab}"))
        assert f"](zh/{lab})" in readme and f"(../zh/{lab})" in english[1]["source"]
        assert f"(../../{lab})" in chinese[1]["source"] and chinese[0]["source"].startswith("# 实验")
        pairs = list(zip(english, chinese, strict=True))
        assert all(e == c for e, c in pairs if e["cell_type"] == "code")
        written = [c["source"] for e, c in pairs if e["cell_type"] == "markdown"]
        assert sum(bool(re.search("[一-鿿]", text)) for text in written) > 0.9 * len(written)
        assert not re.search("[一-鿿。，]\n *[一-鿿]", "\n\n".join(written)), "a browser would put blanks there"


def test_writing_leaves_what_is_equal_and_removes_what_is_no_page(tmp_path: Path) -> None:
    assert not pages.write({"a.md": "a", "b/c.md": "c", "p.png": b"\1"}, tmp_path)
    before = (tmp_path / "a.md").stat().st_mtime_ns
    assert pages.write({"a.md": "a", "b/d.md": "d"}, tmp_path)
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == {"a.md", "b/d.md"}
    assert (tmp_path / "a.md").stat().st_mtime_ns == before and (tmp_path / "b" / "d.md").read_text() == "d"
