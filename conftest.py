"""For every test and every notebook under nbval.

Tests and notebooks see no GPU, so that they do the same on a GPU node as on a laptop; `pytest --gpus` lets them.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

import tests.no_iris  # noqa: F401  also without nbval

# Until the tests are collected: what is imported and made for them is never garbage, and to look for some takes a third
# of that time.
gc.disable()

# Kernels and ranks of notebooks under nbval inherit these: one thread a rank, plain text, no progress bars.
os.environ.update(OMP_NUM_THREADS="1", NO_COLOR="1", TQDM_DISABLE="1")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpus", action="store_true", help="tests and notebooks may see this machine's GPUs")


def pytest_configure(config: pytest.Config) -> None:
    """Before anything has asked for a GPU, or made a temporary file; all processes of tests inherit it.

    What a process that was killed leaves in the folder for temporary files goes with the run. pytest's own folders, in
    which the files of a failed test can be looked at, stay where they are.
    """
    if not config.getoption("--gpus"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not hasattr(config, "workerinput"):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="mm-")
        config.add_cleanup(lambda: shutil.rmtree(tempfile.gettempdir(), ignore_errors=True))
    if config.getoption("nbval", False):
        import nbval.kernel

        from tests.warm_kernels import WarmManager

        nbval.kernel.KernelManager = WarmManager


# Files are dealt out to processes whole (--dist=loadfile). One that takes a minute must not be the last to begin.
LONGEST = (
    "tests/notebooks/test_any_cpu.py", "tests/notebooks/test_browser.py", "solutions/12", "solutions/05",
    "solutions/06", "solutions/10", "solutions/03", "solutions/07", "solutions/08", "solutions/01", "solutions/02",
    "solutions/04",
    "tests/e2e/", "tests/labkit/test_build.py", "tests/labkit/", "tests/training/", "tests/parallel/", "labs/",
    "tests/faults/", "tests/kernels/",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others as they come."""
    places = {prefix: place for place, prefix in enumerate(LONGEST)}
    items.sort(key=lambda item: next((place for prefix, place in places.items() if item.nodeid.startswith(prefix)), 99))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of collected tests are never garbage: without them a collection of garbage is cheap, and seldom.

    Nor is what was garbage before: to find it takes a second and a half, and it is little.
    """
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000)  # what tests import is no garbage either
        gc.enable()


def pytest_collectstart(collector: Any) -> None:
    """What a notebook writes to stderr (a warning of a library) is not compared."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)
