"""What must hold of the repository as text: pins, private paths, docstrings, deadlines, and who reads the environment.

`ruff` finds what executes data that it reads (`eval`, `pickle`, `shell=True`) and rebound globals; an exception is a
`noqa` with its reason, on the line.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Everything that is imported; the source of a lab is text, and so are learners' answers.
MODULES = sorted(
    path
    for package in ("minimegatron", "labkit", "course")
    for path in (ROOT / package).rglob("*.py")
    if path.name != "lab.py" and "answers" not in path.parts
)


@functools.cache
def texts() -> dict[Path, str]:
    """Path below the root -> content, of every text file that git knows or would add; without git, of all."""
    listing = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, timeout=60)
    paths = [ROOT / name for name in done.stdout.splitlines()] or [p for p in ROOT.rglob("*") if ".venv" not in p.parts]
    contents = {path.relative_to(ROOT): path.read_bytes() for path in paths if path.is_file()}
    return {path: raw.decode("utf-8") for path, raw in contents.items() if b"\0" not in raw[:8192]}


@functools.cache
def trees() -> dict[str, tuple[ast.Module, list[str]]]:
    """Path below the root -> syntax tree and lines."""
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in MODULES}
    return {name: (ast.parse(source), source.splitlines()) for name, source in sources.items()}


@functools.cache
def nodes() -> dict[str, list[ast.AST]]:
    """Path below the root -> every node of its tree."""
    return {name: list(ast.walk(tree)) for name, (tree, _) in trees().items()}


# ---------------------------------------------------------------------------------------------- environment


def requirements() -> dict[str, Requirement]:
    project = PROJECT["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {r.name.lower(): r for r in map(Requirement, lines)}


def pins() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pairs = [re.fullmatch(r"([A-Za-z0-9_.-]+)==([A-Za-z0-9_.]+)", line) for line in lines if line]
    assert all(pairs), "constraints.txt holds one `name==version` a line and nothing else"
    names = [re.sub("[-_.]+", "-", m[1].lower()) for m in pairs if m]
    assert len(names) == len(set(names)), "a name has two pins"
    return {m[1].lower(): m[2] for m in pairs if m}


def test_every_direct_dependency_is_pinned_inside_its_range_and_only_in_constraints() -> None:
    assert set(requirements()) <= set(pins())
    for name, requirement in requirements().items():
        assert requirement.specifier.contains(pins()[name]), f"{name}=={pins()[name]} is outside {requirement}"
        assert "==" not in str(requirement.specifier)
    for name in ("Makefile", "environment.yml", "README.md", "CONTRIBUTING.md", ".ci/run"):
        assert "==" not in re.sub(r"`[^`]*`", "", (ROOT / name).read_text()).replace("ifneq", ""), name


def test_every_extra_that_is_installed_by_name_is_there_and_the_site_has_what_it_imports() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    said = "".join(
        (ROOT / name).read_text() for name in ("Makefile", "environment.yml", "README.md", "docs/installing.md")
    )
    names = re.findall(r"\"optional-dependencies\"\]\[\"(\w+)\"\]", said)
    names += [name for found in re.findall(r"(?:\.|minimegatron)\[([a-z,]+)\]", said) for name in found.split(",")]
    assert {"lab", "serve", "test", "browser", "site"} <= set(names) <= set(extras)
    assert {"sphinx", "myst-nb", "pydata-sphinx-theme", "sphinx-mathjax-offline"} <= set(extras["site"])
    assert "docs.site" in PROJECT["tool"]["mypy"]["packages"]


def pythons() -> list[str]:
    """The Pythons for which what is pinned has wheels, as pyproject.toml says, the oldest first."""
    return [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if "Python :: 3." in line]


def test_environment_yml_installs_this_package_with_the_pins() -> None:
    """With no bound conda takes the newest Python, for which torch as it is pinned has no wheel."""
    *conda, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    newest = int(pythons()[-1].removeprefix("3."))
    assert conda == [f"python{PROJECT['project']['requires-python']},<3.{newest + 1}", "pip", "make"]
    assert pip == {"pip": ["-c constraints.txt", "-e .[lab,serve,test]"]}


def test_the_wheel_is_tried_with_every_python() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/wheel.yml").read_text())["jobs"]["try"]
    assert job["strategy"]["matrix"] == {"python-version": pythons()}


@pytest.mark.parametrize(
    "version, system, made",
    [("3.10", "", False), ("3.11", "", True), ("3.14", "", True), ("3.15", "", False), ("3.15", "1", True)],
)
def test_make_takes_a_python_that_has_wheels_of_the_pins(tmp_path: Path, version: str, system: str, made: bool) -> None:
    """With SYSTEM=1 torch is not pinned, so a later Python is taken."""
    python = tmp_path / "python"
    lie = f"import sys; sys.version_info = (3, {version[2:]}, 0, 'final', 0)"
    python.write_text(
        f"""#!/bin/sh
case "$1" in
--version) echo Python {version}.0 ;;
-m) for last; do :; done; mkdir "$last" && touch "$last/pyvenv.cfg" ;;
-c) exec {sys.executable} -c "{lie}; exec(sys.argv[1])" "$2" ;;
esac
"""
    )
    python.chmod(0o755)
    venv = tmp_path / "venv"
    command = ["make", f"{venv}/pyvenv.cfg", f"VENV={venv}", f"PYTHON={python}", f"SYSTEM={system}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (venv / "pyvenv.cfg").exists() == made == (done.returncode == 0), done.stdout + done.stderr
    said = f"Python {pythons()[0]} to {pythons()[-1]}, and {python} is Python {version}.0." in done.stdout
    assert said == (not made)


def test_make_asks_for_megatron_core_where_it_has_a_wheel() -> None:
    (line,) = re.findall(r"--no-deps '(megatron-core.*)'", (ROOT / "Makefile").read_text())
    marker = Requirement(line).marker
    assert marker is not None
    assert [v for v in pythons() if marker.evaluate({"python_version": v})] == ["3.11", "3.12", "3.13"]


def test_pre_commit_has_the_ruff_that_is_pinned() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"].endswith("/ruff-pre-commit") and repo["rev"] == f"v{pins()['ruff']}"
    assert [hook["id"] for hook in repo["hooks"]] == ["ruff-check", "ruff-format"]


@pytest.mark.parametrize("name, target", [("test", "make test"), ("thorough", "make thorough"), ("site", "make site")])
def test_a_workflow_runs_what_a_person_runs(name: str, target: str) -> None:
    workflow = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == (".ci/run" if name == "test" else target)
    assert (ROOT / ".ci/run").read_text().endswith("\nmake test\n")


def test_citation_readme_and_changes_have_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "minimegatron" / "__init__.py").read_text(), re.M)
    assert version and str(citation["version"]) == version[1] and citation["license"] == PROJECT["project"]["license"]
    for name in ("README.md", "README.zh.md"):
        said = set(re.findall(r"^minimegatron (\S+), torch", (ROOT / name).read_text(), re.M))
        assert said == {version[1]}, name
    changes = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert changes[0] in (version[1], "Unreleased") and version[1] in changes[:2]


# ---------------------------------------------------------------------------------------------------- text


# Written in pieces, so that this file does not contain what it looks for.
PRIVATE = re.compile(
    "|".join(
        ["/ho" + r"me/\w", "/Us" + r"ers/\w", "/ro" + r"ot/[\w.]", "/wo" + r"rk/\w", "/op" + r"t/py", r"\bC:\\" + r"\w"]
    )
)
HOSTS = re.compile(
    "|".join(
        [
            "py" + r"pi\.org",
            "python" + "hosted",
            "download" + r"\.pytorch",
            "anaconda" + r"\.(org|com)",
            "--(extra-)?index" + "-url",
        ]
    )
)


@pytest.mark.parametrize(("pattern", "what"), [(PRIVATE, "a path of somebody's machine"), (HOSTS, "a package index")])
def test_no_file_names(pattern: re.Pattern[str], what: str) -> None:
    found = [f"{path}: {m[0]}" for path, text in texts().items() for m in pattern.finditer(text)]
    assert not found, f"{what}: {found[:10]}"


def test_no_file_is_large() -> None:
    large = {path: size >> 10 for path in texts() if (size := (ROOT / path).stat().st_size) > 1 << 20}
    assert not large, f"KiB of files over 1 MiB, which every clone keeps for ever: {large}"


# ---------------------------------------------------------------------------------------------------- code


def test_every_module_has_a_docstring() -> None:
    assert not [name for name, (tree, _) in trees().items() if not ast.get_docstring(tree)]


def test_every_module_of_labkit_is_in_its_table() -> None:
    table = ast.get_docstring(trees()["labkit/__init__.py"][0]) or ""
    first = {word for row in re.findall(r"^\|.*$", table, re.M) for word in re.findall(r"`(\w+)`", row)}
    modules = {path.stem for path in (ROOT / "labkit").glob("*.py")} - {"__init__"}
    assert not sorted(modules - first)


# Packages whose processes are somebody's children, or compile code: they pass the environment on. Elsewhere arguments
# decide, and nothing else.
READ_ENVIRONMENT = tuple(f"minimegatron/{name}" for name in ("launch/", "commands/", "kernels/", "planner/measure.py"))


def test_the_environment_decides_nothing() -> None:
    reads = {
        name
        for name, each in nodes().items()
        for node in each
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert not [name for name in reads if not name.startswith((*READ_ENVIRONMENT, "labkit/", "course/07_"))]


# A collective under way has a deadline already: its group's timeout and the watchdog of `comm`. These packages wait for
# nothing else.
COLLECTIVES = ("minimegatron/comm/", "minimegatron/layers/", "minimegatron/parallel/", "minimegatron/planner/")
BLOCKING = {"join", "get", "recv", "communicate", "select", "acquire", "result", "wait"}
GROUPS = {"init_process_group", "new_group", "new_subgroups", "monitored_barrier"}


def waits(nodes: Iterable[ast.AST], lines: list[str], collectives: bool = False) -> Iterator[int]:
    """Lines that wait without a deadline and do not say `# no deadline: why`."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, owner = node.func.attr, node.func.value
            of_subprocess = isinstance(owner, ast.Name) and owner.id == "subprocess"
            must_say = name in GROUPS or (of_subprocess and name in ("run", "call", "check_call", "check_output"))
            blocks = not collectives and name in BLOCKING and not node.args and not node.keywords
            if (must_say and not any(k.arg == "timeout" for k in node.keywords)) or blocks:
                if "# no deadline: " not in "".join(lines[node.lineno - 1 : node.end_lineno]):
                    yield node.lineno


def test_nothing_waits_for_ever() -> None:
    found = {
        f"{name}:{line}"
        for name, (_, lines) in trees().items()
        for line in waits(nodes()[name], lines, name.startswith(COLLECTIVES))
    }
    assert not found, f"give a timeout, or say `# no deadline: why`: {sorted(found)}"


@pytest.mark.parametrize("source", ["dist.new_group(ranks)", "process.wait()", "queue.get()", "subprocess.run(c)"])
def test_the_scanner_sees_waits_without_a_deadline(source: str) -> None:
    assert list(waits(ast.walk(ast.parse(source)), [source])) == [1]
    assert not list(waits(ast.walk(ast.parse(source)), [source + "  # no deadline: because"]))


@pytest.mark.parametrize(
    "source", ["dist.new_group(ranks, timeout=t)", "process.wait(5)", "table.get('key')", "', '.join(words)"]
)
def test_the_scanner_leaves_other_calls_alone(source: str) -> None:
    assert not list(waits(ast.walk(ast.parse(source)), [source]))


def test_no_process_group_is_made_with_device_id() -> None:
    """It would have one communicator, which deadlocks (`tests/parallel/pipeline/test_nccl_order.py`)."""
    for name, each in nodes().items():
        calls = [node for node in each if isinstance(node, ast.Call)]
        assert not [call.lineno for call in calls for word in call.keywords if word.arg == "device_id"], name


def test_nothing_that_is_loaded_is_trusted() -> None:
    """torch.load reads weights only, unless it is told otherwise; the rest of the rule is ruff's."""
    trusting = re.compile(r"weights_only=False|allow_pickle=True|trust_remote_code=True")
    assert not [path for path in MODULES if trusting.search(path.read_text())]
