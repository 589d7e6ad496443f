"""The demos from nothing equal one process, are short, import nothing of ours, and see the mistakes they warn of."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "from_scratch"
Pools = Callable[[int], Any]
RANKS = {"data_parallel": 2, "tensor_parallel": 2, "pipeline": 4, "context_parallel": 2, "expert_parallel": 2,
         "expert_data_parallel": 4, "moe": 1}  # fmt: skip
MISTAKES = {
    "data_parallel": [("p.grad /= count", "p.grad /= count / 1.25"), ('reduction="sum"', 'reduction="mean"')],
    "tensor_parallel": [
        ("        dist.all_reduce(grad)\n", ""),
        ('g(y @ p["proj"].T) + p["bias"]', 'g(y @ p["proj"].T + p["bias"])'),
    ],
    "pipeline": [("held.pop(0)", "held.pop()")],
    "context_parallel": [("(lse - new).exp() * out", "out"), ("dk + ds.T @ q", "ds.T @ q")],
    "expert_parallel": [
        ('    dist.all_reduce(part["router"].grad)\n', ""),
        ("came, rows.contiguous()", "came, rows * 2"),
    ],
    "expert_data_parallel": [('group=None if name == "router" else same', "group=None")],
    "moe": [("order // TOP_K", "order % len(x)")],
}


def difference(rank: int, world: int, name: str, old: str, new: str) -> float:
    """What `main()` of a demo returns on this rank, one text of it replaced."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert source.count(old) >= 1
    module = types.ModuleType(name)
    sys.path.insert(0, str(FOLDER))
    try:
        exec(compile(source.replace(old, new), f"{name}.py", "exec"), module.__dict__)  # noqa: S102  a file of ours
        return float(module.main())
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("expert_parallel", None)


def on_ranks(pools: Pools, name: str, old: str = "", new: str = "") -> float:
    return max(pools(RANKS[name]).run(difference, name, old, new))


@pytest.mark.parametrize("name", RANKS)
def test_a_demo_has_the_gradients_of_one_process(name: str, pools: Pools) -> None:
    assert on_ranks(pools, name) < 1e-5


@pytest.mark.parametrize("name, old, new", [(name, *each) for name, several in MISTAKES.items() for each in several])
def test_a_demo_with_its_classic_mistake_has_others(name: str, old: str, new: str, pools: Pools) -> None:
    assert not on_ranks(pools, name, old, new) < 1e-3


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_demo_is_short_and_stands_alone(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert path.stem in RANKS and len(source.splitlines()) <= 80
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        assert all(name.split(".")[0] in {"torch", "copy", "expert_parallel"} for name in names)
