"""The shape of the house: what must be read to understand a file, no circles, and how large each package may become.

The closure of a file is every file of the project that its import statements reach, those in functions included, those
under TYPE_CHECKING left out. Budgets are what each took when it was last lowered, with a little air; raise one only
with a reason that stands here.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("minimegatron", "labkit", "course")

# file -> (files, lines, why so much)
CLOSURES = {
    "minimegatron.comm.collectives": (
        6,
        860,
        "axis, announced calls, events, errors; what is under way, on gloo in parts",
    ),
    "minimegatron.layers.linear": (9, 1460, "collectives, and what a parameter is"),
    "minimegatron.parallel.schedules": (4, 730, "lists of actions and their check"),
    "minimegatron.parallel.pipeline": (6, 1000, "schedules, and what every executor does"),
    "minimegatron.models.decoder": (30, 4260, "every layer of a dense decoder; optional parts are named"),
    "minimegatron.training.step": (36, 5900, "a model is passed in; the step knows gradients, optimizer, reports"),
}
# Lines of Python that minimegatron may have when all of it is built; docs/architecture.md says which package how many.
# The drawings of the labs, `viz`, which no other package imports, have a budget of their own beside it.
FINISHED, DRAWINGS = 36_110, 4_500


def modules() -> dict[str, Path]:
    """Dotted name -> file, of everything that is imported; the source of a lab and learners' answers are text."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "lab.py" and "answers" not in path.parts:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import statement that may run."""
    if isinstance(tree, ast.Import | ast.ImportFrom):
        yield tree
    skipped = isinstance(tree, ast.If) and ast.unparse(tree.test).endswith("TYPE_CHECKING")
    for node in tree.orelse if skipped else ast.iter_child_nodes(tree):
        yield from statements(node)


def imported(source: str, name: str, known: dict[str, Path]) -> set[str]:
    """The project's modules that a source imports; `name` is its own, which relative imports begin from."""
    package = name if known[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        above = package.rsplit(".", node.level - 1)[0] if node.level else ""
        base = ".".join(filter(None, (above, node.module)))
        for alias in node.names:
            found.add(f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base)
    return (found & set(known)) - {name}


@functools.cache
def graph() -> dict[str, set[str]]:
    return {name: imported(path.read_text(), name, MODULES) for name, path in MODULES.items()}


def closure(name: str, edges: dict[str, set[str]]) -> set[str]:
    """The module, and everything that it reaches."""
    seen, left = set[str](), [name]
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            left += edges[one]
    return seen


def circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """Modules that reach each other."""
    reached = {name: closure(name, edges) for name in edges}
    return {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in edges
        if any(name in reached[other] for other in edges[name])
    }


def lines(names: set[str]) -> int:
    return sum(len(MODULES[name].read_text().splitlines()) for name in names)


@pytest.mark.parametrize("name", CLOSURES)
def test_a_file_is_understood_by_reading_few(name: str) -> None:
    found = closure(name, graph())
    files, most, why = CLOSURES[name]
    assert len(found) <= files and lines(found) <= most, (
        f"{name} ({why}) reaches {len(found)} files and {lines(found)} lines, the budget is {files} and {most}: "
        + ", ".join(sorted(found))
    )


def test_no_two_files_import_each_other_by_any_way() -> None:
    assert not circles(graph())


def named(source: str, name: str, known: dict[str, Path]) -> set[str]:
    """The project's modules that a source names in a string, to import them when they are wanted."""
    strings = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    return {one for one in known if one in strings and "." in one} - {name}


def test_a_module_that_is_named_hides_no_circle_either() -> None:
    known = {name: path for name, path in MODULES.items() if name.startswith("minimegatron")}
    edges = {name: graph()[name] & set(known) for name in known}
    for name in set(known) - {"minimegatron.moved"}:  # its strings are names that are gone, and where to look
        edges[name] = edges[name] | named(known[name].read_text(), name, known)
    assert "minimegatron.layers.moe" in edges["minimegatron.models.gpt_layer_specs"], "names are not seen"
    assert not circles(edges)


SOURCES = {
    "a": "import b\nif TYPE_CHECKING:\n    import c\nelse:\n    import d\n",
    "b": "def f():\n    from p import inside\n",
    "c": "import a\n",
    "d": "",
    "p": "",
    "p.inside": "from . import other\nfrom .other import x\n",
    "p.other": "try:\n    from p.inside import y\nexcept ImportError:\n    pass\n",
}


def test_the_walk_sees_functions_relative_imports_and_circles() -> None:
    known = {name: Path("p/__init__.py" if name == "p" else f"{name}.py") for name in SOURCES}
    edges = {name: imported(text, name, known) for name, text in SOURCES.items()}
    assert edges["a"] == {"b", "d"} and edges["b"] == {"p.inside"} and edges["p.inside"] == {"p.other"}
    assert closure("a", edges) == {"a", "b", "d", "p.inside", "p.other"}
    assert circles(edges) == {frozenset({"p.inside", "p.other"})}


def test_help_of_train_needs_no_torch() -> None:
    code = (
        "import sys\nfrom minimegatron.cli import main\n"
        "try:\n    main(['train', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'it was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0 and "--tensor-model-parallel-size" in done.stdout, done.stderr


# ---------------------------------------------------------------------------------------------------- size


def sizes() -> dict[str, tuple[int, int]]:
    """Package -> (lines, budget), from the table in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| ([\d,]+) \|", text, re.M)
    return {name: (int(now.replace(",", "")), int(budget.replace(",", ""))) for name, now, budget in rows}


def counted() -> dict[str, int]:
    """Package -> lines of Python that are not blank; `root` is what lies beside the packages."""
    found: dict[str, int] = {}
    for path in sorted((ROOT / "minimegatron").rglob("*.py")):
        parts = path.relative_to(ROOT / "minimegatron").parts
        name = parts[0] if len(parts) > 1 else "root"
        found[name] = found.get(name, 0) + sum(bool(line.strip()) for line in path.read_text().splitlines())
    return found


def test_every_package_stays_within_its_budget_and_their_sum_within_the_whole() -> None:
    table, now = sizes(), counted()
    assert set(now) <= set(table), f"no row in docs/architecture.md: {sorted(set(now) - set(table))}"
    over = {name: (lines, table[name][1]) for name, lines in now.items() if lines > table[name][1]}
    assert not over, f"(lines, budget): {over}"
    drawings = table["viz"][1]
    assert sum(budget for _, budget in table.values()) - drawings <= FINISHED and drawings <= DRAWINGS


def test_the_table_of_sizes_says_what_is_there() -> None:
    said, now = sizes(), counted()
    wrong = {name: (said[name][0], lines) for name, lines in now.items() if abs(said[name][0] - lines) > 0.05 * lines}
    assert not wrong, f"(docs/architecture.md, counted), more than a twentieth apart: {wrong}"
