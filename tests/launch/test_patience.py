"""Who starts slowly is waited for; who stands still or loops for ever is not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from minimegatron.errors import DeadlineError
from minimegatron.launch import patience, procs
from minimegatron.launch.ledger import Ledger
from minimegatron.launch.patience import LONGEST, Patience, Starting, cpu_seconds
from tests.faults import helpers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that the test sets: `clock[0] = seconds`."""
    now = [0.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    yield now


def given_up_at(clock: list[float], seconds: float, gains: set[int], until: int = 500) -> int:
    """When a wait ends in which there is progress in these seconds."""
    waiting = Patience(seconds, lambda: int(clock[0]) in gains)
    for second in range(until):
        clock[0] = float(second)
        if waiting.is_over():
            return second
    return until


@pytest.mark.parametrize(
    ("gains", "end"),
    [(set(), 9), ({3}, 12), ({3, 10, 17}, 26), (set(range(500)), int(8 * LONGEST) + 1)],
)
def test_a_wait_ends_so_long_after_the_last_sign_of_progress_and_ends(
    clock: list[float], gains: set[int], end: int
) -> None:
    assert given_up_at(clock, 8.0, gains) == end


def spin(seconds: float) -> subprocess.Popen[bytes]:
    """A process that has used so much of a processor, says so, and sleeps."""
    code = f"import time\nwhile time.process_time() < {seconds}: pass\nprint(1, flush=True)\ntime.sleep(1000)"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def test_processor_time_tells_who_starts_from_who_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    process = spin(0.3)
    try:
        starting = Starting(lambda: [process.pid])
        starting.gained()
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        assert cpu_seconds(process.pid)[0] >= 0.25
        assert starting.gained(), "it got on"
        helpers.wait_for(lambda: not cpu_seconds(process.pid)[1], 20, "it sleeps")
        starting.gained()
        assert not starting.gained(), "it sleeps"
        starting._seen[process.pid] -= 0.1
        monkeypatch.setattr(patience, "ENOUGH", 0.2)
        assert not starting.gained(), "it has had enough for a start"
    finally:
        process.kill()
        process.communicate(timeout=5)


def test_who_waits_for_a_processor_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = Starting(lambda: [1])
    for state in ((5.0, True), (5.0, False), (patience.ENOUGH, True)):
        monkeypatch.setattr(patience, "cpu_seconds", lambda pid, state=state: state if pid == 1 else (0.0, False))
        starting._seen = {1: state[0]}
        assert starting.gained() == (state == (5.0, True))


def test_a_wrapper_is_looked_at_with_what_it_started() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], timeout=60)"
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ntime.sleep(1000)"
    process = subprocess.Popen([sys.executable, "-c", code, busy], stdout=subprocess.PIPE)
    try:
        starting = Starting(lambda: [process.pid])
        starting.gained()
        before = cpu_seconds(process.pid)[0]
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        starting._seen[process.pid] = max(before, cpu_seconds(process.pid)[0])
        assert starting.gained()
    finally:
        for pid in procs.descendants(process.pid):
            procs.send(pid, 9)
        process.kill()
        process.communicate(timeout=5)


def test_without_proc_nothing_is_seen_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(self: Path) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", no_file)
    assert cpu_seconds(os.getpid()) == (0.0, False)
    starting = Starting(lambda: [os.getpid()])
    assert not starting.gained() and not starting.gained()


def test_a_meeting_waits_for_whom_another_machine_sees_starting() -> None:
    """Rank 0 sees nobody; rank 1 sees rank 2 start, three times; then rank 2 comes, later than anybody's deadline."""
    store, errors = dist.HashStore(), list[str]()
    looks = threading.Semaphore(0)
    left = [40]

    def sees() -> bool:
        looks.release()
        left[0] -= 1
        return left[0] > 0

    def meet(rank: int) -> None:
        try:
            Ledger(store, rank, 3).meet("start", 0.4, sees if rank == 1 else lambda: False)
        except DeadlineError as error:
            errors.append(error.what)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for _ in range(20):  # a look takes a tenth of a second, so twice the deadline has passed
        assert looks.acquire(timeout=20)
    Ledger(store, 2, 3).meet("start", 20)
    for thread in threads:
        thread.join(20)
    assert errors == []


def test_a_meeting_without_progress_names_who_is_missing() -> None:
    with pytest.raises(DeadlineError, match="start: ranks 1-2 did not come within 0.2 s"):
        Ledger(dist.HashStore(), 0, 3).meet("start", 0.2)
