"""Start victims in the background, find all that belongs to them, see that it goes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from labkit.ranks.agent import FORK, end_marked, marked
from minimegatron.launch import procs

DEAF = """
import os, time
open(os.environ["MINIMEGATRON_RUN_DIR"] + "/started." + os.environ["RANK"], "w").close()
time.sleep(1000)
"""  # a script that does not use this package
VICTIM = Path(__file__).with_name("victim.py")
PACKAGE = Path(procs.__file__).resolve().parents[2]
FOREVER = "1000000"


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def all_checked_in(folder: Path, nproc: int) -> None:
    wait_for(lambda: len(list(folder.glob("started.*"))) == nproc, 60, "all ranks checked in")


def everything_gone(token: str, seconds: float = 5.0) -> None:
    """Fail unless no process carries the token after `seconds`."""
    wait_for(lambda: not marked(token), seconds, f"no process is left of {sorted(marked(token))}")


def alive(pid: int) -> bool:
    """Whether a process runs; an orphan that has ended may stay a zombie where nobody reaps it."""
    return os.path.exists(f"/proc/{pid}") and procs.zombie_status(pid) is None


def pids_by_rank(agent: subprocess.Popen[str]) -> list[int]:
    """Of the ranks of one node, which their agent has started in this order."""
    return procs.children(agent.pid)


@contextlib.contextmanager
def background(
    folder: Path, *command: str, timeout: float = 20.0, prefix: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `python ...` with its run directory in `folder`; the process, and the token that its descendants carry.

    Args:
        prefix: words that run what follows them, somewhere else.
    """
    token = f"MINIMEGATRON_RUN_DIR={folder}"
    env = {k: v for k, v in os.environ.items() if not k.startswith("MINIMEGATRON_")}
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    env.update(MINIMEGATRON_RUN_DIR=str(folder), PYTHONPATH=str(PACKAGE), OMP_NUM_THREADS="1", TIMEOUT=str(timeout))
    env.update(TMPDIR=str(temporary))
    with open(folder / "output", "w") as out:
        process = subprocess.Popen(
            [*prefix, sys.executable, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, token
    finally:
        process.kill()
        process.wait(5)
        end_marked(token)


def agent(nproc: int, *args: str, fork: bool = True) -> list[str]:
    """The command line of our `torchrun` with the victim.

    Args:
        fork: the ranks, in place of executing Python for each.
    """
    command = ["-m", "labkit.ranks.agent", *([FORK] if fork else [])]
    return [*command, "--standalone", f"--nproc-per-node={nproc}", str(VICTIM), *args]


def listening(pids: list[int]) -> set[str]:
    """Local addresses, in hexadecimal, at which these processes listen."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].partition(":")[0])
    return found
