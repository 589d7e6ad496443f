"""Where nvcc is looked for, and what is said when it is too old for the GPU."""

from __future__ import annotations

import types

import pytest

from minimegatron.kernels import build, toolkit

SAID = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {}, V{}.140\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without nvcc; `put` installs one in a folder of it."""
    monkeypatch.setattr(toolkit, "_site_packages", lambda: [str(tmp_path / "site")])
    monkeypatch.setattr(toolkit.sys, "executable", str(tmp_path / "venv/bin/python"))

    def put(folder: str) -> str:
        path = tmp_path / folder / "nvcc"
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return str(path)

    return types.SimpleNamespace(put=put, root=tmp_path, system=str(tmp_path / "usr/local/cuda"))


def test_every_place_is_looked_at_in_the_order_of_the_table(machine):
    root = machine.root
    environ = {"CUDA_HOME": f"{root}/home", "PATH": f"{root}/path", "CONDA_PREFIX": f"{root}/conda"}
    assert toolkit.nvcc(environ, machine.system) is None
    places = [  # the last place first: each new one hides those before it
        ("usr/local/cuda/bin", machine.system),
        ("site/nvidia/cuda_nvcc/bin", "pip"),
        ("site/nvidia/cu13/bin", "pip"),
        ("venv/bin", "beside Python"),
        ("conda/bin", "conda"),
        ("path", "PATH"),
        ("home/bin", "CUDA_HOME"),
    ]
    for folder, origin in places:
        path = machine.put(folder)
        assert toolkit.nvcc(environ, machine.system) == (path, origin)


def test_a_file_that_cannot_be_run_is_no_compiler(machine):
    (machine.root / "home/bin").mkdir(parents=True)
    (machine.root / "home/bin/nvcc").write_text("")
    assert toolkit.nvcc({"CUDA_HOME": f"{machine.root}/home"}, machine.system) is None


def test_pips_compiler_is_told_where_pips_libraries_are():
    """Its own profile names lib64, where the packages have lib: without this the linker finds no runtime."""
    assert toolkit.beside("/x/nvidia/cu13/bin/nvcc") == ("-L/x/nvidia/cu13/lib",)
    assert toolkit.beside("/x/nvidia/cuda_nvcc/bin/nvcc") == (
        "-I/x/nvidia/cuda_runtime/include",
        "-L/x/nvidia/cuda_runtime/lib",
    )
    assert toolkit.beside("/usr/local/cuda/bin/nvcc") == ()


@pytest.mark.parametrize("said,capability,wanted", [
    ("11.5", (9, 0), "12.0"), ("12.0", (9, 0), None), ("12.6", (10, 0), "12.8"), ("12.6", (12, 0), "12.8"),
    ("13.0", (12, 0), None), ("11.7", (8, 9), "11.8"), ("11.0", (8, 0), None), ("10.2", (7, 5), None),
])  # fmt: skip
def test_a_compiler_older_than_the_gpu_is_said(said, capability, wanted):
    if wanted is None:
        toolkit.check_knows("/a/nvcc", SAID.format(said, said), capability)
        return
    with pytest.raises(build.KernelsUnavailable) as error:
        toolkit.check_knows("/a/nvcc", SAID.format(said, said), capability)
    words = (f"nvcc {said} does not know this GPU", f"needs nvcc {wanted} or newer", "/a/nvcc", "CUDA_HOME")
    assert all(word in str(error.value) for word in words)


def test_the_runtime_is_linked_in():
    """So that nvcc 12 serves a torch of CUDA 13, whose libraries do not include libcudart.so.12."""
    assert "--cudart=static" in build.CUDA_FLAGS
