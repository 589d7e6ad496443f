"""Builds a lab and its solution from one source: `python -m labkit.build [01 ...] [--check] [--force]`.

    course/01_name/lab.py     ──┬── unchanged ────────────────────── run ──> solutions/01_name.ipynb
    (see `labkit/source.py`)    └── bodies replaced by a stub ────── run ──> labs/01_name.ipynb

Both are stored with their outputs, so that any viewer shows them and nbval can compare a new run with them. Pictures
are stored with a palette: a drawing has a dozen flat colours and the shades at its edges, looks the same with 128, and
takes a third of the bytes; a repository that stores every lab twice grows by as much less at each build.
`--check` builds without running and fails when a stored notebook differs from the source, was not run from top to
bottom, has an error, an absolute path or a warning, when a solution does not get full marks, or a stub gets some.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from PIL import Image

from labkit.said import WORDS
from labkit.source import HIDDEN, checked, edited, name_of, notebooks
from labkit.verdict import SIGNS
from minimegatron.errors import ConfigError, MinimegatronError

_ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|Users|usr|opt|var|private|mnt|work|srv)/[\w./-]*|site-packages")
_CELL_SECONDS = 300
_COLOURS = 128
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # what is stored is what every machine shows
    "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "PYTHONHASHSEED": "0",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status: 0, or 2 when something is wrong or stale."""
    parser = argparse.ArgumentParser("python -m labkit.build", description="Build the labs from their sources.")
    parser.add_argument("labs", nargs="*", help="numbers or names; all by default")
    parser.add_argument("--check", action="store_true", help="build nothing; fail if a stored notebook is stale")
    parser.add_argument("--force", action="store_true", help="write over a lab that has been worked in")
    options = parser.parse_args(argv)
    try:
        problems = []
        for source in _sources(Path.cwd(), options.labs):
            problems += check(source) if options.check else build(source, options.force)
        for problem in problems:
            print(problem)
        return ConfigError.exit_code if problems else 0
    except MinimegatronError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def _sources(root: Path, wanted: Sequence[str]) -> list[Path]:
    found = sorted((root / "course").glob("[0-9][0-9]_*/lab.py"))
    if not found:
        raise ConfigError(f"no course/NN_name/lab.py in {root.name}", fix="run this in the repository's root")
    chosen = [path for path in found if not wanted or name_of(path) in wanted or name_of(path)[:2] in wanted]
    if len(chosen) < len(wanted):
        raise ConfigError(
            f"no source for {' '.join(wanted)}", fix=f"choose from {' '.join(name_of(path) for path in found)}"
        )
    return chosen


def build(source: Path, force: bool = False) -> list[str]:
    """Write and run both notebooks of a source.

    Returns:
        What is wrong with the result, as from `check`.
    Raises:
        ConfigError: the source breaks a rule, a cell failed, or the lab has been worked in.
    """
    both = list(notebooks(source))
    for _, target in both if not force else []:
        refuse_to_overwrite(target)
    for notebook, target in both:
        _execute(notebook, target)
        target.parent.mkdir(exist_ok=True)
        nbformat.write(notebook, target)
        print(f"wrote {_name(target)}")
    return check(source)


def refuse_to_overwrite(target: Path) -> None:
    """Protect a learner's work.

    Raises:
        ConfigError: the notebook holds other cells than a build wrote.
    """
    if target.exists() and edited(nbformat.read(target, 4)):
        raise ConfigError(f"{_name(target)} holds cells that no build wrote", fix="move it away, or say --force")


def check(source: Path) -> list[str]:
    """What is outdated or wrong in the stored notebooks of a source, one line each."""
    problems = []
    for fresh, target in notebooks(source):
        if not target.exists():
            problems.append(f"{_name(target)}: missing")
            continue
        stored = nbformat.read(target, 4)
        problems += [
            f"{_name(target)}: {problem}" for problem in _problems(fresh, stored, target.parent.name == "labs")
        ]
    return problems


def _name(target: Path) -> str:
    return f"{target.parent.name}/{target.name}"


def _execute(notebook: Any, target: Path) -> None:
    folder = target.parent
    folder.mkdir(exist_ok=True)
    shutil.rmtree(folder / ".work" / target.stem, ignore_errors=True)
    language = dict(notebook.metadata["language_info"])
    package_root = str(Path(__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory(prefix="minimegatron-build-") as private:
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": path, "IPYTHONDIR": private}
        client = NotebookClient(
            notebook, timeout=_CELL_SECONDS, kernel_name="python3", record_timing=False, coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        )  # fmt: skip
        try:
            client.execute(env=environment)
        except CellExecutionError as error:
            raise ConfigError(_failed_cell(notebook), where=_name(target), fix=f"it said: {error.evalue}") from None
        except (CellTimeoutError, DeadKernelError) as error:
            raise ConfigError(_failed_cell(notebook), where=_name(target), fix=str(error).splitlines()[0]) from None
    notebook.metadata["language_info"] = language
    for cell in notebook.cells:
        if HIDDEN in cell.metadata.get("tags", []):
            cell.outputs = []
    smaller(notebook)


def smaller(notebook: Any) -> None:
    """Give every PNG among the outputs a palette, where that saves bytes."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                raw = base64.b64decode(data["image/png"])
                data["image/png"] = base64.b64encode(min(raw, with_palette(raw), key=len)).decode()


def with_palette(png: bytes) -> bytes:
    """The same picture on white in at most `_COLOURS` colours."""
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    flat = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    buffer = io.BytesIO()
    flat.quantize(_COLOURS, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _failed_cell(notebook: Any) -> str:
    run = [i for i, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code" and cell.execution_count]
    number = run[-1] if run else 1
    return f"cell {number} did not end well: {notebook.cells[number - 1].source.splitlines()[0]}"


def _problems(fresh: Any, stored: Any, lab: bool) -> Iterator[str]:
    if [_written(cell) for cell in fresh.cells] != [_written(cell) for cell in stored.cells]:
        differ = [f.id for f, s in zip(fresh.cells, stored.cells, strict=False) if _written(f) != _written(s)]
        yield f"not what the source says, from cell {differ[0] if differ else 'count'} on; build it again"
        return
    if fresh.metadata != stored.metadata:
        yield "its metadata are not what the build writes; build it again"
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        yield "not run from top to bottom; build it again"
    for cell in stored.cells:
        for problem in _problems_of(cell, lab):
            yield f"cell {cell.id}: {problem}"


def _written(cell: Any) -> tuple[Any, ...]:
    return cell.cell_type, cell.source, cell.id, dict(cell.metadata)


def _problems_of(cell: Any, lab: bool) -> Iterator[str]:
    outputs = cell.get("outputs", [])
    said = "\n".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs)
    if found := _ABSOLUTE.search(f"{cell.source}\n{said}"):
        yield f"an absolute path, {found[0]}"
    if any(o.output_type == "error" for o in outputs) and "raises-exception" not in cell.metadata.get("tags", []):
        yield "it ended in an error"
    if any(o.get("name") == "stderr" for o in outputs):
        yield "it wrote to stderr; silence the warning at its source"
    if outputs and HIDDEN in cell.metadata.get("tags", []):
        yield "it stores an answer that a learner is to guess"
    state = "todo" if lab else "passed"
    if checked(cell) and not said.strip().startswith(SIGNS[state]):
        yield f"its check should say `{WORDS[state]}` in a {'lab' if lab else 'solution'}; it says {said.strip()[:200]}"


if __name__ == "__main__":
    sys.exit(main())
