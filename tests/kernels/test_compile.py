"""nvcc takes every kernel file for the GPUs of four generations, and keeps in registers what is meant to be there."""

from __future__ import annotations

import re

import pytest

from minimegatron.kernels import build
from tests.thorough import mostly_thorough

# A multiprocessor has 65536 registers: blocks of 1024 threads can have 64 a thread, of 512 threads 128. A launch that
# asks for more fails on a GPU and nowhere else.
LIMITS = {"norm": 128, "softmax": 128, "flash_attention": 255, "rope": 128}
ARCHITECTURES = [(8, 0), (9, 0), (10, 0), (12, 0)]


@pytest.mark.skipif(build.compiler("cuda") is None, reason="no nvcc: CUDA compilation is not checked here")
@pytest.mark.parametrize("name", mostly_thorough(build.sources(), lambda name: name == "norm"))
def test_compiles_for_sm_80_to_sm_120a_without_spills(name):
    """In bf16, the dtype that is trained in; a stack frame means that an array meant for registers is in memory."""
    others = (flag for capability in ARCHITECTURES[1:] for flag in build.gencode(capability))
    path = build.library(name, "cuda", capability=ARCHITECTURES[0], extra=(*others, "-DMM_ONLY_DTYPE=1"))
    log = (path.parent / "log").read_text()
    assert set(re.findall(r"for '(sm_\w+)'", log)) == {"sm_80", "sm_90a", "sm_100a", "sm_120a"}
    frames = [tuple(map(int, t)) for t in re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", log)]
    assert frames and set(frames) == {(0, 0, 0)}
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert max(registers) <= LIMITS.get(name, 64), f"{name}: {sorted(registers)}"
    assert "warning" not in log


def test_an_h100_gets_its_own_instructions():
    assert build.gencode((9, 0)) == ("-gencode", "arch=compute_90a,code=sm_90a")
    assert build.gencode((8, 0)) == ("-gencode", "arch=compute_80,code=sm_80")
