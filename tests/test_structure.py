"""No circle of imports, imports in functions and under TYPE_CHECKING included: these are dependencies, too."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("minimegatron", "labkit", "course")


def modules() -> dict[str, Path]:
    """Dotted name -> file, of everything that is imported; the source of a lab and learners' answers are text."""
    files = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "lab.py" and "answers" not in path.parts:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                files[name.removesuffix(".__init__")] = path
    return files


MODULES = modules()


def statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import statement; expressions, which are most of a tree, contain none."""
    if isinstance(tree, ast.Import | ast.ImportFrom):
        yield tree
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        inside = getattr(tree, part, None)
        for node in inside if isinstance(inside, list) else ():
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


def test_no_two_files_import_each_other() -> None:
    assert not circles(graph())


SOURCES = {
    "a": "import b\nif TYPE_CHECKING:\n    import c\nelse:\n    import d\n",
    "b": "def f():\n    from p import inside\n",
    "c": "import a\n",
    "d": "",
    "p": "",
    "p.inside": "from . import other\nfrom .other import x\n",
    "p.other": "try:\n    from p.inside import y\nexcept ImportError:\n    pass\n",
}


def test_the_walk_sees_functions_types_relative_imports_and_circles() -> None:
    known = {name: Path("p/__init__.py" if name == "p" else f"{name}.py") for name in SOURCES}
    edges = {name: imported(text, name, known) for name, text in SOURCES.items()}
    assert edges["a"] == {"b", "c", "d"} and edges["b"] == {"p.inside"} and edges["p.inside"] == {"p.other"}
    assert closure("a", edges) == {"a", "b", "c", "d", "p.inside", "p.other"}
    assert circles(edges) == {frozenset({"a", "c"}), frozenset({"p.inside", "p.other"})}


def test_help_of_train_needs_no_torch() -> None:
    code = (
        "import sys\nfrom minimegatron.cli import main\n"
        "try:\n    main(['train', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'it was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0 and "--tensor-model-parallel-size" in done.stdout, done.stderr
