"""Notebooks as another machine runs them: other instructions, other seeds, the same nbval against the stored outputs.

The problem in a sentence: torch's kernels sum in another order on another CPU, AdamW turns a last digit into another
decision of a router forty steps later, and a sentence that a notebook stores was true on the machine that stored it.

| what changes                         | how                            | what must stay                            |
|--------------------------------------|--------------------------------|-------------------------------------------|
| instructions of torch, oneDNN, MKL   | variables of the environment   | every output that nbval compares          |
| every seed of a cell but an exercise | `shifted` rewrites the text    | all but numbers with a point, see `LOOSE` |

Nothing in the labs knows of this: a seed in a cell is a number, and another number stands there in the copy.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import nbformat
import torch

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1200  # for one notebook, on a machine that does other things, too

# What a CPU of that kind would run. MKL_CBWR is what MKL does on a CPU of another maker, too.
MACHINES: Mapping[str, Mapping[str, str]] = {
    name: {
        "ATEN_CPU_CAPABILITY": torchs, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl, "MKL_CBWR": branch,
    }
    for name, torchs, onednn, mkl, branch in (
        ("portable", "default", "SSE41", "SSE4_2", "COMPATIBLE"),
        ("avx2", "avx2", "AVX2", "AVX2", "AVX2"),
        ("avx512", "avx512", "AVX512_CORE", "AVX512", "AVX512"),
    )
}  # fmt: skip
_CAPABILITIES = {"portable": (), "avx2": ("AVX2", "AVX512"), "avx512": ("AVX512",)}

# With other seeds a number with a point is another number. Counts and sentences are not.
LOOSE = """
[counts of a batch that a seed draws]
regex: tokens that count on each rank: .*
replace: COUNTS

[numbers with a point, and one that is rounded to a whole number now and then]
regex: [ ]*-?\\d+\\.\\d+(e-?\\d+)?%?|[ ]\\d+(?= times one rounding)
replace: NUMBER
"""


def possible(machine: str) -> bool:
    """Whether this CPU can play the other one: it runs less than it could, never more."""
    able = _CAPABILITIES[machine]
    return not able or torch.backends.cpu.get_cpu_capability() in able


def shifted(source: str, by: int) -> str:
    """A cell's text with all its seeds moved by `by`: what `manual_seed` gets, a model's seed, every `seed=`, SEEDS.

    A name `seed` stays: it was moved where it was given. So does a whole exercise, whose checks know their seeds.
    """
    if not by or source.startswith("%%exercise"):
        return source
    python = "\n".join("#" * len(line) if re.match(r"\s*[%!]", line) else line for line in source.split("\n"))
    lines = source.split("\n")
    seeds = [node for node in _seeds(ast.parse(python)) if not (isinstance(node, ast.Name) and node.id == "seed")]
    for node in sorted(seeds, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        assert node.end_lineno is not None and node.end_col_offset is not None
        line = lines[node.end_lineno - 1].encode()
        end = node.end_col_offset
        lines[node.end_lineno - 1] = (line[:end] + b" + %d" % by + line[end:]).decode()
    return "\n".join(lines)


def _seeds(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "seed")
            if name == "manual_seed":
                yield from node.args[:1]
            elif name in ("build_model", "build_model_chunks"):
                yield from node.args[2:3]
        elif isinstance(node, ast.FunctionDef):
            named = [*node.args.posonlyargs, *node.args.args]
            given = zip(reversed(named), reversed(node.args.defaults), strict=False)
            yield from (default for argument, default in given if argument.arg == "seed")
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            yield from node.value.elts if [getattr(to, "id", "") for to in node.targets] == ["SEEDS"] else ()


def run_elsewhere(notebook: Path, machine: str, shift: int, folder: Path) -> str:
    """Run a stored notebook under nbval on a machine that `possible` allows, its seeds moved by `shift`.

    Returns:
        What nbval says about cells that fail or print something else, "" when there are none.
    """
    copy = folder / notebook.parent.name / notebook.name
    copy.parent.mkdir(parents=True)
    stored = nbformat.read(notebook, 4)
    for cell in stored.cells:
        if cell.cell_type == "code":
            cell.source = shifted(cell.source, shift)
    nbformat.write(stored, copy)
    rules = (ROOT / "tests" / "nbval_sanitize.cfg").read_text() + (LOOSE if shift else "")
    (folder / "sanitize.cfg").write_text(rules)
    (folder / "conftest.py").write_bytes((ROOT / "conftest.py").read_bytes())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "--nbval-sanitize-with=sanitize.cfg",
         "--nbval-cell-timeout=180", "-q", "-p", "no:cacheprovider", "--rootdir=.", "--color=no", str(copy)],
        cwd=folder, env={**environment, **MACHINES[machine], "PYTHONPATH": path}, text=True, timeout=SECONDS,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return "" if ended.returncode == 0 else ended.stdout
