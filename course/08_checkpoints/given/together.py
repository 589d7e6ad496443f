"""Simulated ranks that share a disk and a store: one of them may die, come late or stall at any of its changes.

The problem in a sentence: a save by many ranks is right if it is right in whatever order they run and whoever stops,
and real ranks show one order and no stop.

Each rank is a thread, and one runs at a time: at each call of the disk or the store the simulation chooses the next
one, always in the same way (`order`). The clock is simulated: a call takes a millisecond, and a wait that nothing ends
takes no real time.

| the store, as torch's `TCPStore` | seconds are a number                                       |
|----------------------------------|------------------------------------------------------------|
| `set(key, text)`                 | 200 characters at most; other ranks see it at once         |
| `get(key)`                       | the text of a key that is there; else a KeyError           |
| `check(keys)`                    | whether all of them are there now                          |
| `wait(keys, seconds)`            | until all are there; a TimeoutError after so many seconds  |
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from course.lab08.disk import Disk, Killed

CALL = 0.001  # simulated seconds of a call
MOST_CALLS = 300  # of one rank
_REAL_SECONDS = 60.0


class _Rank:
    """The state of a rank between two of its calls."""

    def __init__(self, number: int, starts: float, kill_at: int, stall_at: int) -> None:
        self.number, self.kill_at, self.stall_at = number, kill_at, stall_at
        self.goes = threading.Semaphore(0)
        self.keys: Sequence[str] = ()
        self.until = starts  # it goes on at this time, or when all of these keys are there
        self.waits, self.stalled, self.over, self.dead = True, False, False, False
        self.calls = self.changes = 0


class Ranks:
    """Ranks on one disk, with an empty store.

    Args:
        disk: what they share; several `Ranks` on one disk are several runs.
        order: 0, the lowest rank that can go on goes on; 1, the highest; any other number seeds a random choice.
        name: of the run, in the events.
        events: where its events are noted; default a list of its own.

    Attributes:
        events: [run, rank, time, what, its arguments ...] of each change of the disk and of each rank's end:
            "returned", "died", or the error.
    """

    def __init__(self, disk: Disk, order: int = 0, name: str = "", events: list[list[Any]] | None = None) -> None:
        self.disk, self.order, self.name, self.now = disk, order, name, 0.0
        self.events: list[list[Any]] = [] if events is None else events
        self.keys: dict[str, str] = {}
        self._random, self._ranks = random.Random(order), list[_Rank]()
        self._back = threading.Semaphore(0)
        self._todo: NotImplementedError | None = None

    def start(
        self, program: Callable[[Any, Any, int], None], rank: int, late: float = 0.0, kill_at: int = 0,
        stall_at: int = 0,
    ) -> None:  # fmt: skip
        """Add a rank that will call `program(disk, store, rank)`.

        Args:
            late: seconds after which it begins.
            kill_at: the number of its change at which it dies; of a write half is done, of another change nothing.
            stall_at: the number of its change before which it stops, until `wake`.
        """
        one = _Rank(rank, self.now + late, kill_at, stall_at)

        def run() -> None:
            end = "returned"
            try:
                self.turn(one, begins=True)
                program(RankDisk(self, one), RankStore(self, one), rank)
            except Killed:
                end = "died"
            except BaseException as error:
                end = f"{type(error).__name__}: {error}"
                self._todo = error if isinstance(error, NotImplementedError) else None
            one.over = True
            self.events.append([self.name, rank, round(self.now, 3), end])
            self._back.release()

        self._ranks.append(one)
        threading.Thread(target=run, daemon=True).start()

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Go on until all ranks have ended or stall, or until `stop()`.

        Raises:
            NotImplementedError: a rank has; there is no program yet.
        """
        while not stop():
            if self._todo:
                raise self._todo
            living = [one for one in self._ranks if not one.over and not one.stalled]
            ready = [one for one in living if not one.waits or self.now >= one.until or self._there(one)]
            if ready:
                one = {0: ready[0], 1: ready[-1]}.get(self.order) or self._random.choice(ready)
                one.goes.release()
                self._back.acquire(timeout=_REAL_SECONDS)
            elif living:
                self.now = min(one.until for one in living)
            else:
                return

    def wake(self) -> None:
        """Ranks that stall go on."""
        for one in self._ranks:
            one.stalled, one.stall_at = False, 0

    def close(self) -> None:
        """End the ranks that still stall."""
        for one in self._ranks:
            one.dead = one.stalled
        self.wake()
        self.run()

    def _there(self, one: _Rank) -> bool:
        return bool(one.keys) and all(key in self.keys for key in one.keys)

    def turn(self, one: _Rank, begins: bool = False) -> None:
        """A rank is at a call: let the simulation choose who goes on, and come back when it is this rank."""
        if not begins:
            one.calls += 1
            if one.calls > MOST_CALLS:
                raise RuntimeError(
                    f"more than {MOST_CALLS} calls: wait for a key with a deadline, do not ask again and again"
                )
            self._back.release()
        one.goes.acquire(timeout=_REAL_SECONDS)
        if one.dead:
            raise Killed
        one.waits = False
        self.now += CALL


class RankDisk:
    """One rank's view of the disk, with the same functions."""

    def __init__(self, ranks: Ranks, one: _Rank) -> None:
        self._ranks, self._one = ranks, one

    def mkdir(self, path: str) -> None:
        self._change("mkdir", path)

    def write(self, path: str, data: bytes) -> None:
        self._change("write", path, bytes(data))

    def fsync(self, path: str = "") -> None:
        self._change("fsync", path)

    def rename(self, old: str, new: str) -> None:
        self._change("rename", old, new)

    def remove(self, path: str) -> None:
        self._change("remove", path)

    def names(self, folder: str = "") -> list[str]:
        self._ranks.turn(self._one)
        return self._ranks.disk.names(folder)

    def read(self, path: str) -> bytes:
        self._ranks.turn(self._one)
        return self._ranks.disk.read(path)

    def _change(self, what: str, *args: Any) -> None:
        one, ranks = self._one, self._ranks
        one.changes += 1
        one.stalled = one.changes == one.stall_at
        ranks.turn(one)
        dies = one.changes == one.kill_at
        if dies and what != "write":
            raise Killed
        if dies:
            args = (args[0], args[1][: len(args[1]) // 2])
        getattr(ranks.disk, what)(*args)
        said = [arg.decode("latin-1") if isinstance(arg, bytes) else arg for arg in args]
        ranks.events.append([ranks.name, one.number, round(ranks.now, 3), what, *said])
        if dies:
            raise Killed


class RankStore:
    """One rank's view of the store."""

    def __init__(self, ranks: Ranks, one: _Rank) -> None:
        self._ranks, self._one = ranks, one

    def set(self, key: str, text: str) -> None:
        if not isinstance(text, str) or len(text) > 200:
            raise ValueError(f"the store takes texts of 200 characters at most, not {text!r:.40}")
        self._ranks.turn(self._one)
        self._ranks.keys[key] = text

    def get(self, key: str) -> str:
        self._ranks.turn(self._one)
        return self._ranks.keys[key]

    def check(self, keys: Sequence[str]) -> bool:
        keys = _listed(keys)
        self._ranks.turn(self._one)
        return all(key in self._ranks.keys for key in keys)

    def wait(self, keys: Sequence[str], seconds: float) -> None:
        one, ranks = self._one, self._ranks
        one.keys, one.until, one.waits = _listed(keys), ranks.now + seconds, True
        ranks.turn(one)
        if missing := [key for key in one.keys if key not in ranks.keys]:
            raise TimeoutError(f"after {seconds:g} s still not there: {', '.join(missing)}")


def _listed(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, str):
        raise TypeError(f"a list of keys, not {keys!r:.40}")
    return list(keys)
