"""Fixtures for every test: warm ranks, and the rule that a test leaves nothing behind."""

from __future__ import annotations

import math
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # at run time inside functions: the controller of xdist, which runs no test, needs no torch
    import torch

    from labkit.ranks.pool import WarmPool
    from tests import twin
    from tests.calls import ComparedRanks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--trials",
        type=int,
        default=1,
        help="at how many random moments each fault of tests/faults strikes, and with how many seeds a notebook runs",
    )
    parser.addoption("--thorough", action="store_true", help="also what is marked `thorough`: whole matrices")
    parser.addoption("--quick", action="store_true", help="without what is marked `slow`, unless --thorough")


def pytest_configure(config: pytest.Config) -> None:
    """No test measures time: an example may take as long as the machine is busy."""
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # the controller of xdist, for which its workers wait
    import hypothesis

    hypothesis.settings.register_profile("ordinary", deadline=None, max_examples=25)
    hypothesis.settings.register_profile("thorough", deadline=None)
    hypothesis.settings.load_profile("thorough" if config.getoption("--thorough") else "ordinary")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `thorough` or, with --quick, `slow`, unless it is asked for.

    By --thorough, by the name of a test, and what is `slow` by the name of its file.
    """
    named = "".join(config.args)
    if not (config.getoption("--thorough") or "::" in named):
        unwanted = ["thorough"] + ["slow"] * (config.getoption("--quick") and ".py" not in named)
        left = {item for item in items if any(map(item.get_closest_marker, unwanted))}
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """What imports torch for the ranks and the kernels of all workers is one process, and begins before they do."""
    from labkit.ranks.fork_server import share

    modules: tuple[str, ...] = ()
    if config.getoption("nbval", False):
        from tests import warm_kernels

        modules = warm_kernels.MODULES
    share(tempfile.mkdtemp(), *modules)


# Packages of tests whose functions leave nothing in their modules: a rank imports those modules once, not for each job.
STATELESS = ("checkpoint", "comm", "inference", "kernels", "layers", "models", "optim", "parallel", "training")


def pytest_collection_finish() -> None:
    """Functions that run on ranks live in files of tests, which import more than the package."""
    from labkit.ranks.pool import this_process

    this_process().keeps = tuple(f"tests.{package}." for package in STATELESS)
    theirs = ("pytest", "hypothesis", "transformers", "tests.twin", "tests.mock_data", "tests.recorder")
    this_process().preload = ("tests.calls", *(name for name in theirs if name in sys.modules))


@pytest.fixture(scope="session")
def docs_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Docstrings of the standard library with a vocabulary of 512, prepared once for all processes of a run.

    Of every eighth file: to parse all of them takes 5 CPU-seconds.
    """
    from minimegatron.data import corpus

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    sources = corpus._sources
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_sources", lambda root: sources(root)[::8])
        corpus.prepare_corpus(folder / "corpus", 512, "docs")
    return folder / "corpus"


@pytest.fixture(scope="session")
def ranks() -> Callable[[int], ComparedRanks]:
    """`ranks(4).run(fn, *args, timeout=20)` runs `fn(rank, world, *args)` on warm ranks and returns a list by rank.

    Collectives of the package are compared between the ranks when the job is over (see `calls`).
    """

    from labkit.ranks.pool import shared_pool
    from tests.calls import ComparedRanks

    return lambda nranks: ComparedRanks(shared_pool(nranks))


@pytest.fixture(scope="session")
def pools() -> Callable[..., WarmPool]:
    """The pools themselves; `pools(4, fingerprints=True)` compares each collective before it is called."""
    from labkit.ranks.pool import shared_pool

    return shared_pool


@pytest.fixture(scope="session")
def assert_same_as_serial(ranks: Callable[[int], ComparedRanks]) -> Callable[..., None]:
    """`assert_same_as_serial(case, dp=2)`: the case's layout, on dp replicas, is the same as one process.

    Every gradient, the loss, the gradient norm; replicas bit for bit; and shards that should differ do (see `twin`).
    """

    from tests import twin

    twins: dict[str, tuple[float, dict[str, torch.Tensor]]] = {}

    def check(case: twin.Case, dp: int = 1, tolerance: float | None = None) -> None:
        sizes = (f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context"))
        world = dp * math.prod(case.layout.get(size, 1) for size in sizes)
        key = twin.twin_key(case, dp)
        if key not in twins:
            twins[key] = twin.serial_gradients(case, dp)
        for report in ranks(world).run(twin.compare_with_serial, case, twins[key]):
            assert twin.problems(report, tolerance or (1e-10 if case.double else 1e-5)) == []

    return check


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a child process, a thread, a listening socket or shared memory."""
    before = _possessions()
    yield
    deadline = time.monotonic() + 3.0
    while (left := sorted(_possessions() - before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"the test left behind: {', '.join(left)}"


def _possessions() -> set[str]:
    from labkit.ranks.fork_server import trunks
    from minimegatron.launch import procs

    stay = {pid for trunk in trunks() for pid in trunk.children()}
    found = {f"process {pid}" for pid in procs.children(os.getpid()) if pid not in stay}
    found |= {f"thread {t.name}" for t in threading.enumerate() if not t.name.startswith("tqdm")}
    found |= {f"/dev/shm/{name}" for name in _entries("/dev/shm") if f"_{os.getpid()}_" in name}
    return found | {f"listening {port}" for fd in _entries("/proc/self/fd") if (port := _listening(int(fd)))}


def _listening(fd: int) -> str:
    """The port that this descriptor listens on, or ""; asked of the socket, since the kernel's table is long."""
    if not _target(f"/proc/self/fd/{fd}").startswith("socket:"):
        return ""
    try:
        with socket.socket(fileno=os.dup(fd)) as listener:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return f"socket {listener.getsockname()}"
    except OSError:
        pass
    return ""


def _entries(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
