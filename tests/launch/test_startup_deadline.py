"""Who starts slowly is waited for; who stands still or loops for ever is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minimegatron.launch import procs, startup_deadline
from minimegatron.launch.startup_deadline import LONGEST, StartupDeadline, StartupProgress, cpu_seconds
from tests.faults import helpers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that the test sets: `clock[0] = seconds`."""
    now = [0.0]
    monkeypatch.setattr(startup_deadline.time, "monotonic", lambda: now[0])
    yield now


def given_up_at(clock: list[float], seconds: float, gains: set[int], until: int = 500) -> int:
    """When a wait ends in which there is progress in these seconds."""
    waiting = StartupDeadline(seconds, lambda: int(clock[0]) in gains)
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
        starting = StartupProgress(lambda: [process.pid])
        starting.made()
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        assert cpu_seconds(process.pid)[0] >= 0.25
        assert starting.made(), "it got on"
        helpers.wait_for(lambda: not cpu_seconds(process.pid)[1], 20, "it sleeps")
        starting.made()
        assert not starting.made(), "it sleeps"
        starting._seen[process.pid] -= 0.1
        monkeypatch.setattr(startup_deadline, "ENOUGH", 0.2)
        assert not starting.made(), "it has had enough for a start"
    finally:
        process.kill()
        process.communicate(timeout=5)


def test_who_waits_for_a_processor_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = StartupProgress(lambda: [1])
    for state in ((5.0, True), (5.0, False), (startup_deadline.ENOUGH, True)):
        monkeypatch.setattr(
            startup_deadline, "cpu_seconds", lambda pid, state=state: state if pid == 1 else (0.0, False)
        )
        starting._seen = {1: state[0]}
        assert starting.made() == (state == (5.0, True))


def test_a_wrapper_is_looked_at_with_what_it_started() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], timeout=60)"
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ntime.sleep(1000)"
    process = subprocess.Popen([sys.executable, "-c", code, busy], stdout=subprocess.PIPE)
    try:
        starting = StartupProgress(lambda: [process.pid])
        starting.made()
        before = cpu_seconds(process.pid)[0]
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        starting._seen[process.pid] = max(before, cpu_seconds(process.pid)[0])
        assert starting.made()
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
    starting = StartupProgress(lambda: [os.getpid()])
    assert not starting.made() and not starting.made()
