"""What must hold of the repository as text: pins, links, paths, and calls that are forbidden in the package.

The tables of exceptions are part of the rules: each entry says why it is safe, and an entry that no longer applies
fails, so that the tables cannot rot.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "minimegatron"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = (PACKAGE, ROOT / "labkit", ROOT / "course")
# Everything that is imported; the source of a lab is text, and so are learners' answers.
MODULES = sorted(
    p for package in PACKAGES for p in package.rglob("*.py") if p.name != "lab.py" and "answers" not in p.parts
)

OWN_PROCESSES = "a pipe between processes that this package started itself; nothing is read from outside"
LEARNERS_CODE = "runs the learner's own code, in a process made for it"
# (file, what) -> why it may. Nothing that is read is executed.
RUNS_CODE = {
    ("labkit/ranks/worker.py", "import pickle"): OWN_PROCESSES,
    ("labkit/ranks/pool.py", "import pickle"): OWN_PROCESSES,
    ("checkpoint/torch_dist.py", "import pickle"): "writes what Megatron reads; reading is `checkpoint/pickled`",
    ("labkit/magics.py", "exec"): LEARNERS_CODE,
    ("labkit/player.py", "exec"): LEARNERS_CODE,
    ("labkit/warm.py", "exec"): LEARNERS_CODE,
    ("labkit/workspace.py", "exec"): LEARNERS_CODE,
}
MESSAGE = "a message of `comm.p2p`, which waits with a deadline and says which rank did not come"
GROUPS_TIMEOUT = "a collective under way: its process group was made with a timeout, and see `comm.watchdog`"
# (file, call) -> why it needs no deadline of its own. Nothing waits for ever.
WAITS = {
    ("comm/collectives.py", "wait"): GROUPS_TIMEOUT,
    ("comm/p2p.py", "wait"): GROUPS_TIMEOUT,
    ("comm/ring.py", "wait"): GROUPS_TIMEOUT,
    ("comm/shared_memory.py", "wait"): GROUPS_TIMEOUT,
    ("layers/attention/context_parallel.py", "wait"): GROUPS_TIMEOUT,
    ("layers/products.py", "wait"): GROUPS_TIMEOUT,
    ("planner/measure.py", "wait"): GROUPS_TIMEOUT,
    ("layers/fp8_linear.py", "wait"): GROUPS_TIMEOUT,
    ("parallel/data/grad_buffer.py", "wait"): GROUPS_TIMEOUT,
    ("parallel/data/param_buffer.py", "wait"): GROUPS_TIMEOUT,
    ("parallel/data/torch_fsdp.py", "wait"): GROUPS_TIMEOUT,
    ("labkit/transport_work.py", "wait"): "in a check, whose processes the nursery ends at the case's deadline",
    ("labkit/transport_group.py", "init_process_group"): "its store is the judge's broker: the same deadline",
    ("labkit/watched.py", "wait"): GROUPS_TIMEOUT,
    ("parallel/pipeline/execution.py", "wait"): MESSAGE,
    ("parallel/pipeline/plain.py", "wait"): MESSAGE,
    ("parallel/pipeline/overlapped.py", "wait"): MESSAGE,
    ("layers/recompute.py", "get"): "of a context variable, which waits for nobody",
    ("labkit/ranks/pool.py", "recv_bytes"): "called when the channel has something; its socket has a receive timeout",
    ("labkit/ranks/worker.py", "recv_bytes"): "an idle rank waits for its next job; its parent's end hangs up",
}
CLEAN = "builds the environment of the processes it starts"
LAUNCHER = "a launcher tells ranks who they are through the environment, and passes its own on"
# file -> why it may read the environment. Behaviour is decided by arguments.
READS_ENVIRONMENT = {
    "commands/jupyter.py": "a command: is there a display, is this a container",
    "commands/doctor.py": "whether CUDA_VISIBLE_DEVICES hides the GPUs that nvidia-smi lists",
    "launch/hardware.py": "the same, and what CUDA itself reads before it begins",
    "planner/measure.py": LAUNCHER,
    "launch/procs.py": "whether the user has set how glibc's malloc works",
    **{f"launch/{name}.py": LAUNCHER for name in ("error_report", "rendezvous", "rank")},
    **{f"labkit/ranks/{name}.py": LAUNCHER for name in ("agent", "torchrun", "worker", "pool")},
    "kernels/build.py": "where compiled libraries are kept",
    "kernels/gpu_setup.py": "a command: what the builds it starts inherit",
    "kernels/toolkit.py": "which CUDA toolkit the user means",
    "labkit/build.py": CLEAN,
    "labkit/magics.py": "nbgrader says so when it runs a notebook, and reads the points off a cell's output",
    "labkit/fresh.py": CLEAN,
    "labkit/nursery.py": CLEAN,
    "labkit/sandbox.py": CLEAN,
}
# file -> why it may rebind a global.
GLOBALS = {"labkit/ranks/pool.py": "a process has at most one fork server, and a fork of it has none yet"}


def tracked() -> list[Path]:
    """Files that git knows, those not yet committed included; a tree without git offers all of its text files."""
    listing = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        return [p for p in ROOT.rglob("*") if p.is_file() and ".venv" not in p.parts]
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


@functools.cache
def texts() -> dict[Path, str]:
    """Path below the root -> content, of every tracked file that is text."""
    found = {}
    for path in tracked():
        raw = path.read_bytes()
        if b"\0" not in raw[:8192]:
            found[path.relative_to(ROOT)] = raw.decode("utf-8")
    return found


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {str(p.relative_to(ROOT)).removeprefix("minimegatron/"): ast.parse(p.read_text()) for p in MODULES}


# ---------------------------------------------------------------------------------------------- environment


def requirements() -> dict[str, Requirement]:
    project = PROJECT["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {r.name.lower(): r for r in map(Requirement, lines)}


def pins() -> list[tuple[str, str]]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    found = [re.fullmatch(r"([A-Za-z0-9_.-]+)==([A-Za-z0-9_.]+)", line) for line in lines if line]
    assert all(found), "constraints.txt holds one `name==version` a line and nothing else"
    return [(m[1].lower(), m[2]) for m in found if m]


def test_every_pin_is_unique_and_inside_its_range():
    names = [re.sub("[-_.]+", "-", name) for name, _ in pins()]
    assert len(names) == len(set(names))
    ranges = requirements()
    for name, version in pins():
        if name in ranges:
            assert ranges[name].specifier.contains(version), f"{name}=={version} is outside {ranges[name]}"


def test_every_direct_dependency_is_pinned_and_only_in_constraints():
    assert set(requirements()) <= {name for name, _ in pins()}
    assert not [r for r in requirements().values() if "==" in str(r.specifier)]
    for name in ("Makefile", "environment.yml", "README.md", "CONTRIBUTING.md", ".ci/run"):
        assert "==" not in re.sub(r"`[^`]*`", "", (ROOT / name).read_text()).replace("ifneq", ""), name


def test_environment_yml_is_python_pip_make_and_this_package():
    spec = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert spec["name"] == PROJECT["project"]["name"]
    *conda, pip = spec["dependencies"]
    assert conda == [f"python{PROJECT['project']['requires-python']}", "pip", "make"]
    assert pip == {"pip": ["-c constraints.txt", "-e .[lab,test]"]}
    assert {"lab", "test"} <= set(PROJECT["project"]["optional-dependencies"])


def test_ci_runs_make_test_and_nothing_else():
    script = (ROOT / ".ci/run").read_text()
    commands = [line for line in script.splitlines() if line.strip() and not line.startswith("#")]
    assert commands[0] == "set -e" and commands[-1] == "make test"
    assert all(line.startswith(("set", "cd", "make test")) for line in commands)


def test_the_makefile_installs_with_the_constraints_and_explains_itself():
    makefile = (ROOT / "Makefile").read_text()
    installs = [line for line in makefile.splitlines() if "pip install" in line]
    assert installs and all("--constraint $(CONSTRAINTS)" in line for line in installs)
    assert "CONSTRAINTS = $(if $(SYSTEM),$(VENV)/constraints.txt,constraints.txt)" in makefile
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.M)[1].split())
    assert phony - {"help"} <= set(re.findall(r"^([a-z]+):.*## ", makefile, re.M))


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
def test_no_file_names(pattern, what):
    found = [f"{path}: {m[0]}" for path, text in texts().items() for m in pattern.finditer(text)]
    assert not found, f"{what}: {found[:10]}"


def anchors(text: str) -> set[str]:
    """The names under which GitHub reaches the headings of a Markdown file."""
    heads = re.findall(r"^#+ +(.*?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def links() -> Iterator[tuple[Path, str]]:
    for path, text in texts().items():
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
                yield path, target[0] or target[1]


def test_links_resolve():
    broken = []
    for path, target in links():
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / path.parent / name).resolve() if name else ROOT / path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(f"{path} -> {target}")
    assert not broken


def readme_tree() -> dict[str, str]:
    """Path -> comment, of the tree in the README; indentation is two spaces a level."""
    block = re.search(r"```text\n(minimegatron/\n.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block, "the README has a commented tree that begins with minimegatron/"
    found, parents = {}, []
    for line in block[1].splitlines():
        entry = re.match(r"( *)([\w./-]+) +(.*)|( *)([\w./-]+)$", line)
        assert entry, line
        depth, name = len(entry[1] or entry[4] or "") // 2, entry[2] or entry[5]
        parents[depth:] = [name]
        found["".join(parents)] = entry[3] or ""
    return found


def test_the_tree_of_the_readme_is_the_tree_of_the_repository():
    tree = readme_tree()
    folders = {str(p.parent.relative_to(ROOT)) + "/" for p in PACKAGE.rglob("__init__.py")}
    packages = {folder for folder in folders if folder.count("/") == 2}
    top = {p.parts[0] + "/" for p in texts() if len(p.parts) > 1 and not p.parts[0].startswith(".")}
    modules = {f"minimegatron/{p.name}" for p in PACKAGE.glob("*.py") if not p.name.startswith("__")}
    missing = (packages | top | modules) - set(tree)
    assert not missing, f"in the repository, not in the README: {sorted(missing)}"
    assert not [name for name in tree if not (ROOT / name).exists()], "in the README, not in the repository"
    assert all(tree[name] for name in packages | modules), "every package has its comment"


# ---------------------------------------------------------------------------------------------------- code


@pytest.mark.parametrize("name", trees())
def test_every_module_has_a_docstring(name):
    assert ast.get_docstring(trees()[name]), f"{name} does not say what it is"


def called(node: ast.Call) -> str:
    """The dotted name of what is called, as far as it is one: `torch.load`, `.wait`, `eval`."""
    parts, at = [], node.func
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    parts.append(at.id if isinstance(at, ast.Name) else "")
    return ".".join(reversed(parts))


def keyword(node: ast.Call, name: str) -> object:
    """The constant value of a keyword argument, Ellipsis when it is no constant, None when it is not given."""
    for given in node.keywords:
        if given.arg == name:
            return given.value.value if isinstance(given.value, ast.Constant) else ...
    return None


def runs_code(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            banned = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
            yield from (f"import {module}" for module in modules if module.split(".")[0] in banned)
        if isinstance(node, ast.Call):
            name = called(node)
            if name in (
                "eval",
                "exec",
                "builtins.eval",
                "builtins.exec",
                "os.system",
                "os.popen",
                "subprocess.getoutput",
            ):
                yield name
            if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
                yield name
            if name == "torch.load" and keyword(node, "weights_only") is not True:
                yield "torch.load"
            for option in ("shell", "allow_pickle", "trust_remote_code"):
                if keyword(node, option) not in (None, False):
                    yield f"{option}=True"


def waits(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        *owner, name = called(node).split(".")
        deadline = keyword(node, "timeout") is not None
        groups = ("init_process_group", "new_group", "new_subgroups", "monitored_barrier")
        if name in (*groups, "urlopen", "create_connection") and not deadline:
            yield name
        if owner == ["subprocess"] and name in ("run", "call", "check_call", "check_output") and not deadline:
            yield f"subprocess.{name}"
        if owner and name in (
            "wait",
            "join",
            "get",
            "recv",
            "recv_bytes",
            "communicate",
            "select",
            "acquire",
            "result",
        ):
            if not node.args and not node.keywords:
                yield name


def reads_environment(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            yield node.attr


def compare(found: set, allowed: set, rule: str) -> None:
    assert not found - allowed, f"{rule}: {sorted(found - allowed)}"
    assert not allowed - found, f"exceptions that no longer apply: {sorted(allowed - found)}"


def test_nothing_that_is_read_is_executed():
    found = {(name, what) for name, tree in trees().items() for what in runs_code(tree)}
    compare(found, set(RUNS_CODE), "runs what it reads")


def test_nothing_waits_for_ever():
    found = {(name, what) for name, tree in trees().items() for what in waits(tree)}
    compare(found, set(WAITS), "waits without a deadline")


def test_no_module_changes_its_own_globals():
    found = {name for name, tree in trees().items() if any(isinstance(n, ast.Global) for n in ast.walk(tree))}
    compare(found, set(GLOBALS), "rebinds a global")


def test_the_environment_decides_nothing():
    found = {name for name, tree in trees().items() if any(True for _ in reads_environment(tree))}
    compare(found, set(READS_ENVIRONMENT), "reads the environment")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import pickle"),
        ("torch.load(f)", "torch.load"),
        ("torch.load(f, weights_only=flag)", "torch.load"),
        ("np.load(f, allow_pickle=True)", "allow_pickle=True"),
        ("subprocess.run(c, shell=True, timeout=1)", "shell=True"),
        ("AutoModel.from_pretrained(n, trust_remote_code=x)", "trust_remote_code=True"),
        ("yaml.load(f, Loader=L)", "yaml.load"),
        ("os.system(c)", "os.system"),
        ("eval(text)", "eval"),
    ],
)
def test_the_scanner_sees_what_it_must(source, what):
    assert list(runs_code(ast.parse(source))) == [what]


@pytest.mark.parametrize(
    "source", ["model.eval()", "re.compile(x)", "torch.load(f, weights_only=True)", "yaml.safe_load(f)"]
)
def test_the_scanner_leaves_harmless_calls_alone(source):
    assert not list(runs_code(ast.parse(source)))


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("dist.new_group(ranks)", True),
        ("dist.new_group(ranks, timeout=t)", False),
        ("process.wait()", True),
        ("process.wait(5)", False),
        ("queue.get()", True),
        ("table.get('key')", False),
        ("', '.join(words)", False),
        ("thread.join()", True),
        ("subprocess.run(c)", True),
        ("subprocess.run(c, timeout=3)", False),
    ],
)
def test_the_scanner_sees_waits_without_a_deadline(source, seen):
    assert bool(list(waits(ast.parse(source)))) is seen


def test_no_file_is_large() -> None:
    large = {path: size >> 10 for path in tracked() if (size := (ROOT / path).stat().st_size) > 1 << 20}
    assert not large, f"KiB of files over 1 MiB, which every clone keeps for ever: {large}"
