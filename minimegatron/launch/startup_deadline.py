"""Deadlines for processes that start: one that makes progress is not missing.

The problem in a sentence: a rank that imports torch needs five seconds of a processor, and on a laptop with twenty busy
processes on two cores it gets those in two minutes, so a deadline in seconds of the clock calls it missing.

A rank that hangs in an import has to be found all the same. Processor time, which the kernel counts
(`/proc/PID/stat`), tells the two apart:

| the process                                     | its processor time                    | it is             |
|-------------------------------------------------|---------------------------------------|-------------------|
| starts, on whatever machine                     | grows, or is asked for; below `ENOUGH`| waited for        |
| waits for a lock, a file, another process       | stands still                          | missing           |
| loops for ever                                  | grows, and is soon above `ENOUGH` s   | missing           |

So a wait of `seconds` ends `seconds` after the last progress, and in any case after `LONGEST * seconds`. Where there is
no `/proc` (macOS), no progress is seen, and the deadline is the clock's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from minimegatron.launch import procs

ENOUGH = 60.0  # seconds of a processor; the imports of a rank take 5 to 10
LONGEST = 10.0


def cpu_seconds(pid: int) -> tuple[float, bool]:
    """Processor time of a process, and whether it is runnable now; (0, False) without `/proc`."""
    fields = procs.stat_of(pid)
    if not fields:
        return 0.0, False
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == "R"


class StartupProgress:
    """Whether starting processes make progress.

    Args:
        pids: gives the processes, at each call; their descendants count as well.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids, self._seen = pids, dict[int, float]()

    def made(self) -> bool:
        """Whether one of them has used a processor since the last call, or waits for one, and has used less than
        `ENOUGH`."""
        before, self._seen, progress = self._seen, dict[int, float](), False
        for pid in self._pids():
            seconds, wants = zip(*map(cpu_seconds, (pid, *procs.descendants(pid))), strict=True)
            self._seen[pid] = total = sum(seconds)
            progress |= total < ENOUGH and (any(wants) or before.get(pid, total) < total)
        return progress


class StartupDeadline:
    """A wait that ends `seconds` after the last progress.

    Args:
        seconds: longest time without progress.
        progress: whether there was any since its last call; called about eight times in `seconds`.
    """

    def __init__(self, seconds: float, progress: Callable[[], bool] = lambda: False) -> None:
        self.seconds, self._progress = seconds, progress
        self._begun = self._last = self._looked = time.monotonic()
        progress()

    def is_over(self) -> bool:
        """Whether the deadline has passed; cheap enough to be called in a loop."""
        now = time.monotonic()
        if now - self._looked >= self.seconds / 8:
            self._looked = now
            if self._progress():
                self._last = now
        return now - self._last > self.seconds or now - self._begun > LONGEST * self.seconds
