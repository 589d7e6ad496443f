"""Libraries that travel in a wheel: chosen by the CPU's instructions, refused for another source, enough without a
compiler."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F

from minimegatron.kernels import build, choice, operators, prebuilt

V3, V4 = ("x86-64-v3", "x86-64-v4")
AVX2, AVX512 = prebuilt.LEVELS[V3], prebuilt.LEVELS[V3] | prebuilt.LEVELS[V4]


@pytest.mark.parametrize(
    "instructions, want",
    [(AVX512, [V4, V3]), (AVX2, [V3]), (AVX2 - {"fma"}, []), (AVX512 - {"avx2"}, []), (AVX512 - {"avx512vl"}, [V3])],
)
def test_a_cpu_takes_the_highest_level_of_which_it_has_all_instructions(tmp_path, instructions, want) -> None:
    assert prebuilt.levels(instructions) == want
    for level in (V3, V4):
        path = prebuilt.place("norm", level, tmp_path)
        path.parent.mkdir()
        path.touch()
    assert prebuilt.found("norm", instructions, tmp_path) == (
        prebuilt.place("norm", want[0], tmp_path) if want else None
    )
    assert prebuilt.found("rope", instructions, tmp_path) is None, "it has not been built"
    assert prebuilt.found("norm", instructions, tmp_path / "nowhere") is None


@pytest.mark.parametrize("edited", ["norm.cpp", "vector.h"])
def test_what_was_built_of_another_source_is_not_taken(tmp_path, monkeypatch, edited: str) -> None:
    shutil.copytree(prebuilt.CSRC, tmp_path / "csrc")
    monkeypatch.setattr(prebuilt, "CSRC", tmp_path / "csrc")
    path = prebuilt.place("norm", V3, tmp_path)
    path.parent.mkdir()
    path.touch()
    assert prebuilt.found("norm", AVX2, tmp_path) == path
    (tmp_path / "csrc" / edited).write_text("// another\n")
    assert prebuilt.found("norm", AVX2, tmp_path) is None


@pytest.mark.slow
def test_without_a_compiler_the_library_that_came_along_computes(tmp_path, monkeypatch) -> None:
    own = prebuilt.levels(build.cpu_instructions().split())
    if not own or not prebuilt.can_build():
        pytest.skip("this CPU has no level, or there is no compiler")
    prebuilt.build(tmp_path, ["activation"], own[:1])
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt, "compiler", lambda: None)
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path / "cache")
    library = operators.load("activation", "cpu")
    assert library.path == prebuilt.place("activation", own[0], tmp_path) and not (tmp_path / "cache").exists()
    x, y = torch.randn(5, 34), torch.empty(5, 17)
    library.call("mm_swiglu_forward", x, y, 5, 17, operators.DTYPES[x.dtype])
    torch.testing.assert_close(y, F.silu(x[:, :17]) * x[:, 17:])
    assert choice.obstacle("cpu") == "this machine has no g++ or clang++", "the others did not come along"
    monkeypatch.setattr(build, "sources", lambda suffix: ["activation"])
    assert choice.obstacle("cpu") is None
