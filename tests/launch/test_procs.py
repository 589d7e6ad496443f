"""Trees of processes, what replaces /proc on other systems than Linux, and memory that is kept."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch

from minimegatron.data import preprocess
from minimegatron.launch import procs
from minimegatron.launch.watch import _pidfds


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Unix without /proc, prctl, packets between processes, and the calls of Linux's scheduler."""
    monkeypatch.setattr(sys, "platform", "darwin")
    real, glob = os.path.isdir, procs.Path.glob
    monkeypatch.setattr(os.path, "isdir", lambda path: not str(path).startswith("/proc") and real(path))
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith("/proc") and os.access(path, os.F_OK))
    monkeypatch.setattr(procs.Path, "glob", lambda self, *a: [] if str(self).startswith("/proc") else glob(self, *a))
    for name in ("sched_getaffinity", "sched_setscheduler", "sched_getscheduler", "pidfd_open"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: pytest.fail("a call of Linux"))


@pytest.mark.skipif(shutil.which("ps") is None, reason="asks ps")
def test_a_tree_is_found_without_proc(elsewhere: None) -> None:
    code = "import subprocess; subprocess.run(['sleep', '1000'], timeout=1000)"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        while not (found := procs.descendants(process.pid)):
            assert process.poll() is None
        assert len(found) == 1 and process.pid in procs.children(os.getpid())
        gone = [pid for pid in procs.children(os.getpid()) if not os.access(f"/proc/{pid}", os.F_OK)]
        assert not gone, "ps itself is none of ours"
        procs.send(found[0], 9)
    finally:
        process.kill()
        process.wait(5)


def test_nothing_of_linux_is_called_elsewhere(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    procs.die_with_parent(9, os.getppid())
    procs.adopt_orphans()
    procs.as_batch_job()
    procs.keep_memory()
    assert procs.zombie_status(2**30) is None
    assert _pidfds({0: os.getpid()}) == {}
    assert procs.usable_cores() >= 1 and len(procs.limits()) == 3
    assert "--workers" in preprocess._parser().format_help()


def faults_of_steps(rank: int, world: int) -> int:
    """Pages that ten steps of 36 MB ask the kernel for, after three others."""
    for number in range(13):
        if number == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        _ = [torch.ones(1_500_000) for _ in range(6)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


USERS_OWN = """
from minimegatron.launch import procs
from tests.launch.test_procs import faults_of_steps
procs.keep_memory()
print(faults_of_steps(0, 1))
"""
glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="another libc")


@glibc
def test_memory_that_was_freed_is_used_again_and_not_given_back(ranks) -> None:
    """Warm ranks keep their memory as those that `torchrun` starts do."""
    assert ranks(1).run(faults_of_steps)[0] < 20_000, "of 88,000 pages; a kernel that reclaims takes some of them"


@glibc
@pytest.mark.thorough
def test_the_users_own_setting_of_memory_counts() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environ |= {"MALLOC_TRIM_THRESHOLD_": "131072", "PYTHONPATH": os.getcwd()}
    assert int(subprocess.check_output([sys.executable, "-c", USERS_OWN], env=environ, timeout=120)) > 50_000


def test_a_tree_is_walked_and_ended_but_for_who_is_spared() -> None:
    code = "import subprocess, sys; subprocess.Popen(['sleep', '1000']); print(1, flush=True); sys.stdin.read()"
    trees = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for tree in trees:
            assert tree.stdout is not None and tree.stdout.readline() == b"1\n"
        inside = [procs.descendants(tree.pid) for tree in trees]
        assert [len(pids) for pids in inside] == [1, 1]
        assert set(procs.descendants(os.getpid())) >= {*inside[0], *inside[1], trees[0].pid, trees[1].pid}
        others = [pid for pid in procs.children(os.getpid()) if pid != trees[0].pid]
        procs.end_descendants(spare=others)
        assert procs.descendants(trees[1].pid) == inside[1] and trees[1].poll() is None
        assert trees[0].poll() is not None
    finally:
        for pid in {pid for pids in inside for pid in pids}:
            procs.send(pid, 9)
        for tree in trees:
            tree.kill()
            tree.communicate(timeout=5)


def test_without_the_kernels_list_of_children_the_tree_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        with_list = procs.children(os.getpid())
        real = os.path.exists
        monkeypatch.setattr(os.path, "exists", lambda path: not str(path).endswith("/children") and real(path))
        assert child.pid in with_list and procs.children(os.getpid()) == with_list
    finally:
        child.kill()
        child.wait(5)
