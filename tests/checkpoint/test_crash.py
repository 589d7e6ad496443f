"""A save dies at any moment: what loads is whole and of one step, and the next save needs no hand to clean up."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from minimegatron.errors import MinimegatronError, RankError
from tests.checkpoint.runs import exact, save_steps
from tests.thorough import mostly_thorough

NEVER = 10_000


def hidden(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name.startswith(".") and p.name != ".lock")


# (victim, background, every so many operations): test_power.py tries every operation each time, on a simulated disk
PLACES = mostly_thorough(
    [(0, False, 6), (1, False, 4), (0, False, 1), (1, False, 1), (0, True, 1), (1, True, 1)], lambda case: case[2] > 1
)


@pytest.mark.parametrize(("victim", "background", "every"), PLACES)
def test_death_at_every_operation_of_a_save(ranks, tmp_path, victim, background, every):
    made = ranks(2).run(save_steps, f"{tmp_path}/count", [1, 2, 3], background, (victim, NEVER, None))[victim]
    assert made >= (20 if victim == 0 else 6), "a save has more operations than that"
    for at in range(1, made + 1, every):
        root = tmp_path / str(at)
        with pytest.raises(RankError):
            ranks(2).run(save_steps, str(root), [1, 2, 3], background, (victim, at, None))
        steps = exact(root)
        # 3 may have been published and not acknowledged; 1 may have been retired
        assert steps in ([1, 2], [1, 2, 3], [2, 3]), f"operation {at}"
        ranks(2).run(save_steps, str(root), [steps[-1] + 1], background)
        assert exact(root) == [steps[-1], steps[-1] + 1] and hidden(root) == [], f"operation {at}"


@pytest.mark.parametrize(("victim", "background", "every"), PLACES)
def test_an_error_at_every_operation_is_that_of_all_ranks(ranks, tmp_path, victim, background, every):
    """A full disk, say: all raise it, the checkpoint before is untouched, nothing half-written stays."""
    made = ranks(2).run(save_steps, f"{tmp_path}/count", [1, 2], background, (victim, NEVER, None))[victim]
    for at in range(1, made + 1, every):
        root, full = tmp_path / str(at), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with pytest.raises(RankError) as caught:
            ranks(2).run(save_steps, str(root), [1, 2], background, (victim, at, full))
        assert "No space left on device" in str(caught.value) and "CheckpointError" in str(caught.value)
        assert "bytes are free" in str(caught.value), f"operation {at}"
        steps = exact(root)
        assert steps in ([1], [1, 2]), f"operation {at}"
        assert hidden(root) == [], f"operation {at}"
        ranks(2).run(save_steps, str(root), [3], background)
        assert exact(root) == [steps[-1], 3]


def kill_at_random(ranks, root: Path, moment: random.Random, background: bool) -> None:
    """Save step after step until a rank, or both, are killed."""
    seen = Path(f"{root}.acknowledged")
    first = int(max(exact(root), default=0)) + 1
    victims = moment.choice([(0,), (1,), (0, 1)])

    def kill() -> None:
        deadline = time.monotonic() + 30
        pids = [Path(f"{root}.{r}.pid") for r in victims]
        while not all(p.exists() and p.read_text() for p in pids) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(moment.random() * 0.25)
        for p in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(p.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(MinimegatronError):
        ranks(2).run(until_killed, str(root), first, background, timeout=60)
    killer.join(30)
    for r in (0, 1):
        Path(f"{root}.{r}.pid").unlink(missing_ok=True)
    steps, acknowledged = exact(root), [int(s) for s in seen.read_text().splitlines()] if seen.exists() else []
    newest = max([0, first - 1, *acknowledged])
    assert newest <= max([0, *steps]) <= newest + 1, (steps, newest)


def until_killed(rank: int, world: int, root: str, first: int, background: bool) -> None:
    Path(f"{root}.{rank}.pid").write_text(str(os.getpid()))
    save_steps(rank, world, root, list(range(first, first + NEVER)), background)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kills", mostly_thorough([2, 150], [0]))
def test_killed_at_random_moments(ranks, tmp_path, background, kills):
    """All in one folder, so that every save also finds what a killed one has left."""
    moment = random.Random(kills)
    for _ in range(kills):
        kill_at_random(ranks, tmp_path / "root", moment, background)
    ranks(2).run(save_steps, f"{tmp_path}/root", [10**6], background)
    assert exact(tmp_path / "root")[-1] == 10**6 and hidden(tmp_path / "root") == []
