"""Several jobs at once, and the same job again and again."""

from __future__ import annotations

import concurrent.futures
import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from labkit.ranks.pool import WarmPool
from labkit.ranks.torchrun import Run, launch
from minimegatron.launch import procs
from tests.faults import helpers


def wait_at(rank: int, world: int, folder: str) -> tuple[int, set[str]]:
    """Stay until told, so that somebody can look; who I am, and where I listen."""
    Path(folder, f"pool.{rank}").touch()
    helpers.wait_for(lambda: Path(folder, "go").exists(), 60, "the word to go")
    return os.getpid(), helpers.listening([os.getpid()])


def rank_id(rank: int, world: int) -> int:
    return rank


def occupied(port: int) -> socket.socket | None:
    try:
        return socket.create_server(("", port))
    except OSError:  # somebody else occupies it already, which does as well
        return None


@pytest.mark.thorough
def test_jobs_at_once_with_the_usual_ports_taken_listen_on_loopback_only(tmp_path: Path) -> None:
    sockets = [occupied(port) for port in (29500, 2333)]
    folders = [tmp_path / name for name in ("a", "b", "c")]
    try:
        with WarmPool(2) as pool, concurrent.futures.ThreadPoolExecutor(3) as threads:

            def start(folder: Path) -> Run:
                return launch(helpers.VICTIM, 2, folder, timeout=60, args=["150"])

            runs = [threads.submit(start, folder) for folder in folders[:2]]
            folders[2].mkdir()
            job = threads.submit(pool.run, wait_at, str(folders[2]), timeout=60)
            for folder in folders[:2]:
                helpers.all_checked_in(folder, 2)
            addresses = helpers.listening(list(procs.marked(f"MINIMEGATRON_RUN_DIR={tmp_path}")))
            (folders[2] / "go").touch()
            assert [run.result(60).explain() for run in runs] == ["", ""]
            addresses |= {address for _, heard in job.result(60) for address in heard}
    finally:
        for held in filter(None, sockets):
            held.close()
    assert addresses == {"0100007F"}, addresses  # 127.0.0.1


def test_starting_and_stopping_leaves_nothing(trial: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def possessions() -> tuple[int, int, int, set[str]]:
        temporary = set(os.listdir(tmp_path))
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(procs.children(os.getpid())), temporary

    def cycle() -> None:
        with WarmPool(2) as pool:
            assert pool.run(rank_id, timeout=20) == [0, 1]

    cycle()
    first, memory = possessions(), resident()
    for _ in range(8):
        cycle()
    assert possessions() == first
    assert resident() < 1.05 * memory


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])
