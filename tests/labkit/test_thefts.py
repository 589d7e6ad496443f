"""Nothing to steal, nothing to reach: each theft runs where a learner's code runs, and must come back with nothing."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit import sandbox
from labkit.exercises import load_lab
from labkit.fresh import Nursery
from labkit.judge import judge
from labkit.nursery import Limits
from labkit.replies import Reply
from minimegatron.errors import RankError
from tests.labkit.thefts import REACHES, READS, TOKEN

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part exists on Linux only")
ROOT = Path(__file__).resolve().parents[2]
DISK = 1 << 20
NUMBERS = {"open_by_handle_at": (304, 265), "clone": (56, 220), "keyctl": (250, 219)}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What there is to steal."""
    (tmp_path / "other.ipynb").write_text(TOKEN)
    intel = platform.machine() == "x86_64"
    with socket.socket(socket.AF_UNIX) as host, socket.socket(socket.AF_UNIX) as abstract:
        host.bind(os.path.relpath(tmp_path / "host"))
        abstract.bind(f"\0{TOKEN}-{os.getpid()}")
        host.listen()
        abstract.listen()
        yield {
            "file": str(tmp_path / "other.ipynb"), "folder": str(tmp_path), "parent": os.getpid(), "root": str(ROOT),
            "host": str(tmp_path / "host"), "abstract": f"{TOKEN}-{os.getpid()}", "disk": DISK,
            "library": torch.__file__, "check": "/course/08_checkpoints/checks/commit.py",
            "number": {name: [pair[0 if intel else 1]] for name, pair in NUMBERS.items()},
        }  # fmt: skip
    assert (tmp_path / "other.ipynb").read_text() == TOKEN


def steal(rank: int, world: int, job: dict[str, Any]) -> Any:
    """Rank 0 tries thefts under the kernel's part of the sandbox; rank 1 holds a job that is worth it."""
    assert Path(job["here"]["root"] + job["here"]["check"]).exists()
    job["here"]["job"] = os.path.dirname(os.getcwd())
    if rank == 1:
        return None
    sandbox.restrict(Path.cwd(), ranks=job["sockets"])
    home, loot = os.getcwd(), {}
    for name, source in job["sources"].items():
        os.chdir(home)
        names = {"here": job["here"], "os": os, "socket": socket, "ctypes": ctypes, "got": None}
        names["libc"] = ctypes.CDLL(None, use_errno=True)
        with contextlib.suppress(OSError, ImportError, RuntimeError, ValueError):
            exec(source, names)
            if names["got"]:
                loot[name] = str(names["got"])[:200]
    return loot


THEFTS = {**{f"read {name}": theft for name, theft in READS.items()}, **REACHES}
APART = ("threads", "disk, without names")
OF_RANKS = ("loopback", "pairs of sockets", "kernel's messages")  # with which ranks meet on a network of their own


def attempt(
    nursery: Nursery, thefts: Iterable[str], here: dict[str, Any], function: Any = steal, sockets: bool = False
) -> Reply:
    job = {"sources": {name: THEFTS[name] for name in thefts}, "here": here, "sockets": sockets}
    rank, _ = nursery.call(
        function, [job, {**job, "inputs": "-".join(("inputs", "of", "others", "too"))}], Limits(10, disk=2 * DISK)
    )
    return rank


@pytest.mark.parametrize("sockets", [False, True], ids=["alone", "one of several ranks"])
def test_a_theft_brings_nothing(nursery: Nursery, here: dict[str, Any], sockets: bool) -> None:
    reply = attempt(nursery, THEFTS.keys() - set(APART) - set(OF_RANKS if sockets else ()), here, sockets=sockets)
    assert reply.ended == ""
    assert reply.value == {}


@pytest.mark.thorough
@pytest.mark.parametrize("name", APART)
def test_what_is_taken_has_a_limit(nursery: Nursery, here: dict[str, Any], name: str) -> None:
    reply = attempt(nursery, [name], here)
    assert reply.value == {} or reply.ended == "wrote more than 2 MiB of files"


POSSIBLE = (
    "read a notebook of another", "read command lines", "read its folder", "read history", "host socket", "processes",
    "read folders of other ranks", "files in memory", "files beside", "life after the grader",
)  # fmt: skip


def test_thefts_succeed_without_the_sandbox(nursery: Nursery, here: dict[str, Any]) -> None:
    """Else the tests above show nothing."""
    assert attempt(nursery, POSSIBLE, here, free).value.keys() == set(POSSIBLE)


def free(rank: int, world: int, job: dict[str, Any]) -> Any:
    sandbox.restrict = lambda folder, ranks: None  # in this process alone
    return steal(rank, world, job)


# ------------------------------------------------------------------------------------------------ the judge's own


FINDS = """
import gc
def bubble(p, m):
    word = "".join(reversed("-ro-dees-eht"))
    for thing in gc.get_objects():
        for one in gc.get_referents(thing):
            if isinstance(one, str) and word in one and len(one) > len(word):
                return (p - 1) / (m + p - 1)
    return -1.0
"""


@pytest.mark.thorough
def test_a_rank_has_neither_the_seed_nor_the_text_of_others(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    course = "tests.labkit.mini_course"
    patient = {"bubble": dataclasses.replace(load_lab(course)["bubble"], seconds=60)}
    monkeypatch.setattr("labkit.judge.load_lab", lambda course: patient)
    judge(nursery, course, "bubble", {"bubble": "'the-seed-or-text of another'\n" + "bubble = lambda p, m: 1"})
    assert judge(nursery, course, "bubble", {"bubble": FINDS}, seed="the-seed-or-text").points == 0
    planted = f"kept = 'the-seed-or-text'\n{FINDS}"
    assert judge(nursery, course, "bubble", {"bubble": planted}, seed="the-seed-or-text").points == 5, "it looks well"


CLINGS = """
import ctypes, os, signal, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
for number in (2, 6, 15): signal.signal(number, signal.SIG_IGN)
print(os.getpid(), file=open(note, "w"), flush=True)
time.sleep(600)
"""


def cling(rank: int, world: int, job: dict[str, str]) -> None:
    """Not even in the sandbox: it has taken back that it ends with its parent."""
    exec(CLINGS, {"note": job["note"]})


@pytest.mark.thorough
def test_no_process_survives_an_interrupt(tmp_path: Path) -> None:
    note, raised = tmp_path / "pid", []
    with Nursery() as mine:

        def call() -> None:
            try:
                mine.call(cling, [{"note": str(note)}], Limits(seconds=60))
            except RankError as error:
                raised.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        deadline = time.monotonic() + 60
        while not (note.exists() and note.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        mine.interrupt()
        thread.join(30)
        assert len(raised) == 1
    state = Path(f"/proc/{note.read_text().strip()}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------- not disturbed


NUMERICS = """
import torch
torch.manual_seed(0)
x, w = torch.randn(64, 128), torch.randn(128, 96)
q = torch.randn(2, 4, 33, 16)
made = [x @ w, (x.bfloat16() @ w.bfloat16()).float(), torch.nn.functional.linear(x, w.t()),
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), torch.softmax(x, -1),
        torch.nn.functional.layer_norm(x, (128,)), torch.nn.functional.conv1d(q[0], q[1][:, :, :5])]
"""


def compute(rank: int, world: int, job: dict[str, bool]) -> Any:
    if job["inside"]:
        sandbox.enter(Path.cwd())
    names: dict[str, Any] = {}
    exec(NUMERICS, names)
    return names["made"]


@pytest.mark.thorough
def test_numbers_are_the_same_inside(nursery: Nursery) -> None:
    """Libraries choose their kernels by what they find out about the machine, some of it in files."""
    [outside] = nursery.call(compute, [{"inside": False}], Limits())
    [inside] = nursery.call(compute, [{"inside": True}], Limits())
    for one, other in zip(outside.value, inside.value, strict=True):
        assert torch.equal(one, other)
