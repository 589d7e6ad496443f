"""Building: once, whole, keyed; and what is said where it cannot be done."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time

import pytest
import torch

from minimegatron.kernels import build, operators
from minimegatron.launch import procs
from tests.thorough import SLOW, mostly_thorough

TINY = """
#include <stdint.h>
extern "C" int mm_answer(void* stream) { return VALUE; }
"""


def tiny(value: int) -> str:
    return TINY.replace("VALUE", str(value))


def test_a_library_is_built_once_and_keyed_by_its_source_and_flags(tmp_path):
    first = build.library("tiny", "emulated", source=tiny(1), cache=tmp_path)
    built = first.stat().st_mtime_ns
    assert build.library("tiny", "emulated", source=tiny(1), cache=tmp_path) == first
    assert first.stat().st_mtime_ns == built
    assert build.library("tiny", "emulated", source=tiny(2), cache=tmp_path) != first
    assert build.library("tiny", "emulated", source=tiny(1), cache=tmp_path, extra=("-DX",)) != first


def test_another_torch_or_compiler_means_another_library(tmp_path, monkeypatch):
    names = set()
    for version in ("2.11.0", "2.13.0"):
        monkeypatch.setattr(torch, "__version__", version)
        for compiler in ("g++ 12", "g++ 13"):
            monkeypatch.setattr(build, "compiler_version", lambda path, compiler=compiler: compiler)
            names.add(build._key(tiny(1), "g++", ()))
    assert len(names) == 4


def builder(value: int, cache) -> int:
    """A forked process, leader of its own group, that builds; its status is 0 when it has the library."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        status = 1
        try:
            build.library("tiny", "emulated", source=tiny(value), cache=cache, deadline_s=60)
            status = 0
        finally:
            os._exit(status)
    with contextlib.suppress(PermissionError):  # where it was quicker; either way it can be killed now
        os.setpgid(child, child)
    return child


def test_four_builders_at_once_build_once(tmp_path):
    children = [builder(3, tmp_path) for _ in range(4)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    folders = [name for name in os.listdir(tmp_path) if os.path.isdir(tmp_path / name)]
    assert len(folders) == 1 and not folders[0].endswith(".tmp")
    assert (tmp_path / folders[0] / "lib.so").exists()


def test_a_builder_killed_at_any_moment_leaves_nothing_in_the_way(tmp_path_factory, tmp_path, monkeypatch):
    """Killed with its compiler (odd) or alone (even), so that an orphaned compiler goes on writing."""
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    start = time.monotonic()
    build.library("tiny", "emulated", source=tiny(0), cache=tmp_path)
    whole = time.monotonic() - start
    for i in range(6):
        child = builder(4, tmp_path)
        time.sleep(whole * (i + 1) / 7)
        (os.killpg if i % 2 else os.kill)(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for path in tmp_path.glob("*/lib.so"):
            ctypes.CDLL(str(path))  # what can be seen can be used
    path = build.library("tiny", "emulated", source=tiny(4), cache=tmp_path, deadline_s=60)
    assert ctypes.CDLL(str(path)).mm_answer(None) == 4
    assert not list(tmp_path.glob("*.tmp")) and not list(temporary.iterdir())


def test_no_compiler_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.KernelsUnavailable, match=r"no g\+\+ or clang\+\+ on this machine"):
        build.library("norm", "emulated", cache=tmp_path)


def test_all_kernels_for_this_cpu_are_built_beforehand(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(build, "came_along", lambda name: None)
    monkeypatch.setattr(build, "library", lambda name, target: asked.append((name, target)))
    build.main()
    assert sorted(asked) == [(name, "cpu") for name in build.sources("cpp")] and not capsys.readouterr().out

    def refused(name, target):
        raise build.KernelsUnavailable("no g++ on this machine", where=f"kernel {name}", fix="install g++")

    monkeypatch.setattr(build, "library", refused)
    build.main()
    assert "install g++" in capsys.readouterr().out


def test_nowhere_to_write_is_said(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(build.KernelsUnavailable, match="cannot write(.|\n)*MINIMEGATRON_KERNEL_CACHE"):
        build.library("tiny", "emulated", source=tiny(5), cache=blocked / "cache")


def test_the_compilers_own_message_is_shown(tmp_path):
    with pytest.raises(build.KernelsUnavailable, match="nonsense"):
        build.library("tiny", "emulated", source="int x = nonsense;", cache=tmp_path)
    assert not list(tmp_path.glob("*/lib.so")) and not list(tmp_path.glob("*.tmp"))


def test_launchers_are_read_from_the_source():
    for name in build.sources():
        found = operators.signatures((build.CSRC / f"{name}.cu").read_text())
        assert found, f"{name}.cu exports nothing"
        assert all(launcher.startswith("mm_") for launcher in found)


def test_a_compiler_that_does_not_end_is_ended_with_its_children(tmp_path, monkeypatch):
    """A driver waits for the real compiler, which holds its output open: without it nobody would come back."""
    driver = tmp_path / "g++"
    driver.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit\nsleep 1000 &\necho $! > {tmp_path}/child\nwait\n")
    driver.chmod(0o755)
    monkeypatch.setattr(build, "compiler", lambda target: str(driver))
    with pytest.raises(build.KernelsUnavailable, match="took longer than 1 s"):
        build.library("tiny", "emulated", source=tiny(5), cache=tmp_path / "cache", deadline_s=1)
    child = int((tmp_path / "child").read_text())
    assert procs.zombie_status(child) is not None or not os.path.exists(f"/proc/{child}")


# ------------------------------------------------------------------------------------------------------------ nvcc

# A multiprocessor has 65536 registers: blocks of 1024 threads can have 64 a thread, of 512 threads 128. A launch that
# asks for more fails on a GPU and nowhere else.
LIMITS = {"norm": 128, "softmax": 128, "flash_attention": 255, "paged_attention": 255, "rope": 128}
ARCHITECTURES = {(8, 0): "sm_80", (9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}


@SLOW
@pytest.mark.skipif(build.compiler("cuda") is None, reason="no nvcc: CUDA compilation is not checked here")
@pytest.mark.parametrize(
    ("name", "capabilities"),
    mostly_thorough([("norm", [(9, 0)]), *((name, list(ARCHITECTURES)) for name in build.sources())], [0]),
)
def test_compiles_for_sm_80_to_sm_120a_without_spills(name, capabilities):
    """In bf16, the dtype that is trained in; a stack frame means that an array meant for registers is in memory."""
    first, *others = capabilities
    flags = (flag for capability in others for flag in build.gencode(capability))
    path = build.library(name, "cuda", capability=first, extra=(*flags, "-DMM_ONLY_DTYPE=1"))
    log = (path.parent / "log").read_text()
    assert set(re.findall(r"for '(sm_\w+)'", log)) == {ARCHITECTURES[capability] for capability in capabilities}
    frames = [tuple(map(int, t)) for t in re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", log)]
    assert frames and set(frames) == {(0, 0, 0)}
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert max(registers) <= LIMITS.get(name, 64), f"{name}: {sorted(registers)}"
    assert "warning" not in log


def test_an_h100_gets_its_own_instructions():
    assert build.gencode((9, 0)) == ("-gencode", "arch=compute_90a,code=sm_90a")
    assert build.gencode((8, 0)) == ("-gencode", "arch=compute_80,code=sm_80")
