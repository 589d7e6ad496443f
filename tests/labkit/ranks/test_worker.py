"""Whatever a job does to its process, the next job finds a clean rank."""

from __future__ import annotations

import builtins
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from labkit.ranks.pool import WarmPool
from minimegatron.comm import fingerprints
from minimegatron.errors import RankError
from tests import twin
from tests.faults import helpers
from tests.thorough import mostly_thorough

COUNTER: list[int] = []


def probe(rank: int, world: int) -> dict[str, Any]:
    """Everything about a rank that a job might notice."""
    return {
        "random": (random.random(), numpy.random.rand(), torch.rand(1).item()),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.ones(1).device),
        "grad": torch.is_grad_enabled(),
        "threads": (torch.get_num_threads(), threading.active_count()),
        "precision": (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        "anomaly": torch.is_anomaly_enabled(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith("OMP") or k == "DIRTY"},
        "directory": os.getcwd(),
        "path": sys.path,
        "arguments": sys.argv,
        "umask": os.umask(0o022),
        "signal": str(signal.getsignal(signal.SIGTERM)),
        "filters": len(warnings.filters),
        "stdout": sys.stdout is sys.__stdout__,
        "group": (dist.get_rank(), dist.get_world_size(), len(dist.distributed_c10d._world.pg_map)),
        "sum": all_reduced(),
        "counter": len(COUNTER),
        "fingerprints": fingerprints._Running.fingerprints is not None,
        "torch": torch.allclose(torch.ones(2), torch.zeros(2)),
        "builtins": hasattr(builtins, "mine"),
    }


def all_reduced() -> float:
    x = torch.ones(1, device="cpu", dtype=torch.float32)
    dist.all_reduce(x)
    return x.item()


def be_untidy(rank: int, world: int, what: str) -> None:
    DIRT[what]()


def _seeds() -> None:
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)


def _tensors() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(3)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(True)


def _process() -> None:
    os.environ["DIRTY"] = "1"
    del os.environ["OMP_NUM_THREADS"]
    os.chdir("/")
    os.umask(0o077)
    sys.path.insert(0, "/nowhere")
    sys.argv.append("x")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("error")
    sys.stdout = open(os.devnull, "w")
    builtins.mine = 1  # type: ignore[attr-defined]


def _groups() -> None:
    groups = [dist.new_group([0]), dist.new_group([0, 1])]
    if dist.get_rank() == 0:
        dist.all_reduce(torch.full((1,), 1000.0), group=groups[1], async_op=True)
        dist.isend(torch.full((1,), 1000.0), 1)
    fingerprints.enable_fingerprints()


def _no_group() -> None:
    dist.destroy_process_group()


def _globals() -> None:
    COUNTER.append(1)


def _error() -> None:
    _tensors(), _process()
    raise ValueError("in the middle of it")


def _patched() -> None:
    torch.allclose = lambda *_, **__: True


def _builtin() -> None:
    builtins.abs = lambda _: 7  # type: ignore[assignment]


def _unreadable() -> None:
    builtins.len = lambda _: 7  # type: ignore[assignment]


def _modules() -> None:
    del sys.modules["torch.nn"]


def _thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def _held() -> None:
    torch.held_groups = [dist.new_group([0, 1]) for _ in range(12)]  # type: ignore[attr-defined]
    for group in torch.held_groups:  # type: ignore[attr-defined]
        dist.all_reduce(torch.ones(1, device="cpu", dtype=torch.float32), group=group)


def _child() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])


CURABLE: dict[str, Callable[[], None]] = {
    f.__name__.strip("_"): f for f in (_seeds, _tensors, _process, _groups, _no_group, _globals, _error)
}
INCURABLE: dict[str, Callable[[], None]] = {
    f.__name__.strip("_"): f for f in (_patched, _builtin, _unreadable, _modules, _thread, _held, _child)
}
DIRT = {**CURABLE, **INCURABLE}


@pytest.fixture(scope="module")
def clean() -> list[dict[str, Any]]:
    with WarmPool(2) as pool:
        return list(pool.run(probe, timeout=20))


def pids(rank: int, world: int) -> int:
    return os.getpid()


@pytest.mark.parametrize("what", mostly_thorough(DIRT, lambda what: what != "builtin"))
def test_the_next_job_finds_a_clean_rank(ranks: Any, clean: list[dict[str, Any]], what: str) -> None:
    pool = ranks(2, fingerprints=False)
    before = pool.run(pids, timeout=20)
    expected = {"error": "in the middle of it", "unreadable": "sent an answer that cannot be read"}.get(what)
    with pytest.raises(RankError, match=expected) if expected else contextlib.nullcontext():
        pool.run(be_untidy, what, timeout=20)
    for after, expected_of_rank in zip(pool.run(probe, timeout=20), clean, strict=True):
        assert {k: v for k, v in after.items() if v != expected_of_rank[k]} == {}
    same = [a == b for a, b in zip(before, pool.run(pids, timeout=20), strict=True)]
    assert same == [what in CURABLE] * 2


def threads_after_training(rank: int, world: int) -> int:
    before = len(os.listdir("/proc/self/task"))
    twin.compare_with_serial(rank, world, twin.Case({"tensor_model_parallel_size": 2}, overlap=True))
    return before


def test_models_and_groups_of_a_job_are_gone_with_it(ranks: Any) -> None:
    threads = [ranks(2).run(threads_after_training, timeout=60) for _ in range(3)]
    assert threads[2] == threads[1], "every job leaves something behind"


def test_user_code_is_imported_anew_for_every_job(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "def answer(rank, world):\n    return {}\n"
    (tmp_path / "learner_module.py").write_text(source.format(1))
    from learner_module import answer  # type: ignore[import-not-found]

    assert ranks(2).run(answer, timeout=20) == [1, 1]
    (tmp_path / "learner_module.py").write_text(source.format(1000))
    assert ranks(2).run(answer, timeout=20) == [1000, 1000]


def test_what_a_job_left_running_ends_with_its_rank(ranks: Any, clean: Any) -> None:
    pool = ranks(2)
    left = pool.run(leave_a_child, timeout=20)
    pool.run(pids, timeout=20)
    helpers.wait_for(lambda: not any(map(helpers.alive, left)), 5, "the children to end")


def leave_a_child(rank: int, world: int) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid
