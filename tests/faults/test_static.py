"""Every wait in the package has a deadline, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import minimegatron

ROOT = Path(minimegatron.__file__).parents[1]
MODULES = sorted(p for package in ("minimegatron", "labkit") for p in (ROOT / package).rglob("*.py"))
# Calls that wait, the argument that bounds them, and its position if it may be given without its name.
BOUNDED = {
    "init_process_group": ("timeout", None),
    "new_group": ("timeout", None),
    "new_subgroups": ("timeout", None),
    "monitored_barrier": ("timeout", 1),
    "communicate": ("timeout", 1),
    "urlopen": ("timeout", 2),
    "create_connection": ("timeout", 1),
}
# What a bare `wait()`, `join()`, `get()` or `recv()` may belong to. In a module that imports none of these it belongs
# to a communication under way, which the timeout of its process group bounds.
WAITING = {"threading", "multiprocessing", "queue", "subprocess", "concurrent", "socket", "asyncio"}
# `recv` in the first may wait for ever: the end of file is the signal to end. The others wait in a check, whose
# processes the nursery ends at its deadline; or for gloo's envelope alone, beside a lock that is a fence.
IDLE = {
    "minimegatron/planner/measure.py",
    "labkit/ranks/worker.py",
    "minimegatron/comm/shared_memory.py",
    "labkit/transport_group.py",
    "labkit/transport_work.py",
}


def waits(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, call) of every call that may wait without a bound."""
    nodes = list(ast.walk(tree))
    imported = {a.name.partition(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
    imported |= {(n.module or "").partition(".")[0] for n in nodes if isinstance(n, ast.ImportFrom)}
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords = {k.arg for k in node.keywords}
        bare = not node.args and not keywords
        if name in BOUNDED:
            argument, position = BOUNDED[name]
            given = {argument, None} & keywords or (position is not None and len(node.args) > position)
        elif name in ("get", "recv", "wait", "join"):
            given = not bare or not imported & WAITING
        elif ast.unparse(node.func) in ("subprocess.run", "subprocess.check_output", "subprocess.check_call"):
            given = "timeout" in keywords
        else:
            continue
        if not given:
            yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_wait_has_a_deadline(path: Path) -> None:
    if str(path.relative_to(ROOT)) in IDLE:
        return
    found = list(waits(ast.parse(path.read_text())))
    assert not found, "\n".join(f"{path}:{line}: {call}" for line, call in found)


@pytest.mark.parametrize(
    "source",
    [
        "dist.init_process_group('gloo')",
        "dist.new_group([0, 1])",
        "import threading; thread.join()",
        "from subprocess import Popen; process.wait()",
        "process.communicate(data)",
        "import queue; q.get()",
        "subprocess.run(['ls'])",
    ],
)
def test_the_reader_sees_what_it_should(source: str) -> None:
    assert len(list(waits(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "dist.new_group([0], timeout=t)",
        "', '.join(words)",
        "import queue; process.wait(5)",
        "work.wait()",
        "d.get('key')",
    ],
)
def test_the_reader_does_not_cry_wolf(source: str) -> None:
    assert not list(waits(ast.parse(source)))
