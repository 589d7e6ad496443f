"""README.md and docs/: the spine has the length that is printed, tables are short, and files that are named exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minimegatron.training.arguments import parse_args

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
SPINE = re.search(r"^## The spine\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)[1]
FILES = re.findall(r"\]\(([\w/]+\.py)\)", SPINE)
# What the other files of the spine cannot be read without.
PREREQUISITES = {
    f"minimegatron/{name}.py"
    for name in (
        "comm/axis",
        "comm/async_ops",
        "layers/attention/core_attention",
        "layers/param",
        "parallel/pipeline/actions",
        "parallel/data/plain",
        "parallel/data/finalize",
    )
}
WORDS_A_CELL = 25


def rows() -> list[list[str]]:
    """Cells of every table row that is not a rule; of a link its words count."""
    lines = [line for line in TEXT.splitlines() if line.startswith("|") and set(line) - set("|-: ")]
    return [[re.sub(r"\]\([^)]*\)", "]", cell).strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_spine_has_the_length_that_is_printed() -> None:
    length = sum(len((ROOT / name).read_text().splitlines()) for name in FILES)
    printed = re.findall(r"about ([\d,]+) lines", SPINE)
    should = f"{round(length, -2):,}"
    assert printed == [should], f"the spine has {length} lines: write `about {should} lines`, not {printed}"


def test_the_spine_begins_with_the_loop_and_names_what_it_needs() -> None:
    assert FILES[0] == "examples/simple_loop.py"
    assert PREREQUISITES <= set(FILES) and len(FILES) == len(set(FILES))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:30] or "head")
def test_cells_are_short(row: list[str]) -> None:
    long = [cell for cell in row if len(cell.split()) > WORDS_A_CELL]
    assert not long, f"more than {WORDS_A_CELL} words (docs/features.md is for long lists): {long}"


def test_the_commands_of_trainings_are_understood() -> None:
    code = "\n".join(re.findall(r"^```(?:bash|console)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))
    lines = re.findall(r"minimegatron train (.*)", code.replace("\\\n", " "))
    assert len(lines) >= 4
    for line in lines:
        parse_args(line.split(), 2 if "--tensor-model-parallel-size 2" in line else 1)


DOCUMENTS = ["README.md", "CONTRIBUTING.md", "SECURITY.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_files_that_are_named_exist(name: str) -> None:
    """`layers/linear` is minimegatron/layers/linear.py; a path that begins at the root is itself."""
    tops = "|".join(p.name for p in (ROOT / "minimegatron").iterdir() if (p / "__init__.py").is_file())
    text = (ROOT / name).read_text()
    modules = re.findall(rf"(?<![\w./-])((?:{tops})/[a-z_0-9]+)(?![\w/])", text)
    paths = re.findall(r"`((?:tests|labkit|course|minimegatron|examples|benchmarks)/[\w./]+)`", text)
    missing = {m for m in modules if not list((ROOT / "minimegatron").glob(f"{m}*"))}
    # NN stands for the number of any lab
    missing |= {path for path in paths if not list(ROOT.glob(re.sub("NN(_name)?", "*", path.rstrip("/"))))}
    assert not missing, sorted(missing)
