"""Plant mistakes in a copy of the project and see who notices: `python -m tests.mutants.run [words of names]`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant

PROJECT = Path(__file__).resolve().parents[2]
PARTS = ("minimegatron", "labkit", "course", "tests", "conftest.py", "pyproject.toml")
SECONDS = 300.0


@contextmanager
def copy_of_the_project() -> Iterator[Path]:
    """A folder with everything that tests of the package read."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for part in PARTS:
            source, target = PROJECT / part, Path(folder, part)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.ipynb"))
            else:
                shutil.copy(source, target)
        yield Path(folder)


def planted(mutant: Mutant, text: str) -> str:
    """The source with the mistake.

    Raises:
        ValueError: the line is not there, or more than once.
    """
    if text.count(mutant.before) != 1:
        raise ValueError(f"{mutant.name}: {text.count(mutant.before)} places in {mutant.file} read {mutant.before!r}")
    return text.replace(mutant.before, mutant.after)


def survives(mutant: Mutant, folder: Path) -> bool:
    """Whether the named tests pass with the mistake in place.

    Raises:
        ValueError: the mutant does not fit the source, or pytest ran no test.
    """
    file = folder / mutant.file
    original = file.read_text()
    file.write_text(planted(mutant, original))
    try:
        return run_tests(mutant.tests, folder) == 0
    finally:
        file.write_text(original)


def run_tests(tests: str, folder: Path) -> int:
    """Exit status of pytest on `tests` (1: some failed; a run that never ends counts as that).

    Raises:
        ValueError: it ran none.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:nbval", "-p", "no:cacheprovider", "-q", "-x", *tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 1
    if done.returncode not in (0, 1):
        raise ValueError(f"pytest {tests} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if all(word in f"{m.name} {m.file}" for word in words)]
    survivors = []
    with copy_of_the_project() as folder:
        for number, mutant in enumerate(chosen, 1):
            begun = time.monotonic()
            lives = survives(mutant, folder)
            survivors += [mutant] * lives
            took = time.monotonic() - begun
            what = "SURVIVED" if lives else "noticed "
            print(f"[{number}/{len(chosen)}] {what} {mutant.name} ({took:.0f} s)", flush=True)
    print(f"score: {len(chosen) - len(survivors)} of {len(chosen)} mistakes are noticed")
    return bool(survivors)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose name or file holds all of these")
    sys.exit(main(parser.parse_args().words))
