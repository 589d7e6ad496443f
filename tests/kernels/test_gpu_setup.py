"""`make gpu` on machines that are not here: facts, a pretended nvidia-smi and a pretended pip."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minimegatron.errors import ConfigError
from minimegatron.kernels import gpu_setup, toolkit
from minimegatron.kernels.gpu_setup import Facts
from tests.thorough import SLOW

H100 = Facts(
    gpus=("NVIDIA H100 80GB HBM3",) * 8,
    capability=(9, 0),
    torch="2.13.0+cu130",
    cuda="13.0",
    python="3.12.3",
    nvcc="/usr/local/cuda/bin/nvcc",
    nvcc_release="13.0",
    cuda_home="/usr/local/cuda",
    cores=64,
    free_gb=400.0,
    installed={},
    headers=("/v/nvidia/cudnn/include", "/v/nvidia/nccl/include"),
    wanted={"flash-attn": "2.8.3"},
)


def changed(**facts) -> Facts:
    return dataclasses.replace(H100, **facts)


def test_the_variables_of_an_h100():
    assert gpu_setup.builds_environment(H100, "/mine") == {
        "MAX_JOBS": "44",
        "NVTE_FRAMEWORK": "pytorch",
        "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
        "TORCH_CUDA_ARCH_LIST": "9.0",
        "NVTE_CUDA_ARCHS": "90",
        "FLASH_ATTN_CUDA_ARCHS": "90",
        "CUDA_HOME": "/usr/local/cuda",
        "CPATH": "/v/nvidia/cudnn/include:/v/nvidia/nccl/include:/mine",
    }


@pytest.mark.parametrize("cores,free,jobs", [(64, 400, 44), (8, 400, 8), (64, 20, 2), (64, 5, 1), (1, 1, 1)])
def test_a_job_has_nine_gigabytes(cores, free, jobs):
    assert gpu_setup.jobs(changed(cores=cores, free_gb=free)) == jobs


@pytest.mark.parametrize("gpu,wanted", [((8, 0), 80), ((8, 9), 80), ((9, 0), 90), ((10, 3), 100), ((12, 0), 120)])
def test_flash_attn_is_compiled_for_this_generation_alone(gpu, wanted):
    assert gpu_setup.generation(gpu) == wanted


def test_wheels_come_first_and_each_package_stands_alone():
    steps = gpu_setup.plan(H100, "python", "pins.txt")
    assert [step.package for step in steps] == ["build tools", "transformer-engine", "flash-attn"]
    for step in steps[1:]:
        wheel, build = step.commands
        assert "--only-binary=:all:" in wheel and "--no-build-isolation" in build
        assert all(("--constraint", "pins.txt") == c[c.index("--constraint") :][:2] for c in step.commands)
    assert steps[1].commands[0][-1] == "transformer-engine[core_cu13,pytorch]"
    older = gpu_setup.plan(changed(cuda="12.8"), "python", "pins.txt")
    assert older[1].commands[0][-1] == "transformer-engine[core_cu12,pytorch]"


def test_what_an_image_brings_stays():
    ngc = changed(installed={"transformer-engine": "2.9.0+abc", "flash-attn": "2.7.4"})
    assert gpu_setup.plan(ngc, "python", "pins.txt") == []
    assert gpu_setup.announce(ngc, [], {}).count("is here already and stays") == 2
    one = gpu_setup.plan(changed(installed={"transformer-engine": "2.9.0"}), "python", "pins.txt")
    assert [step.package for step in one] == ["build tools", "flash-attn"]


def test_without_nvcc_there_are_only_wheels():
    steps = gpu_setup.plan(changed(nvcc=None), "python", "pins.txt")
    assert [(step.package, len(step.commands)) for step in steps] == [("transformer-engine", 1), ("flash-attn", 1)]
    assert "there is no nvcc" in gpu_setup.announce(changed(nvcc=None), steps, {})


@pytest.mark.parametrize("facts,words", [
    (changed(gpus=()), "lists no GPU"),
    (changed(torch=None), "torch is not installed"),
    (changed(cuda=None, torch="2.13.0+cpu"), "without CUDA"),
])  # fmt: skip
def test_what_stands_in_the_way_is_said(facts, words):
    assert words in gpu_setup.obstacle(facts)
    assert gpu_setup.obstacle(H100) is None


# --------------------------------------------------------------------------------------------- a pretended machine

PIP = """#!/bin/sh
echo "$@" MAX_JOBS=$MAX_JOBS ARCHS=$FLASH_ATTN_CUDA_ARCHS >> {log}
case "$*" in *only-binary*flash-attn) exit 1;; *flash-attn) {build};; esac
"""


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A GPU node: `node.run(...)` is `make gpu`; `node.calls()` is what pip was asked for."""
    log, stamp, pins = tmp_path / "calls", tmp_path / "venv/.gpu.json", tmp_path / "pins.txt"
    stamp.parent.mkdir()
    pins.write_text("flash-attn==2.8.3\n")
    log.touch()

    def program(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
        return str(tmp_path / name)

    program("nvidia-smi", "#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 9.0'\n")
    nvcc = program("nvcc", "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(toolkit, "nvcc", lambda: toolkit.Nvcc(nvcc, "PATH"))
    monkeypatch.setattr(gpu_setup, "_torch", lambda: ("2.13.0+cu130", "13.0"))
    monkeypatch.setattr(gpu_setup, "MODULES", {"transformer-engine": "no_such_te", "flash-attn": "no_such_fa"})

    class Node:
        def run(self, *more: str, build: str = "exit 1") -> int:
            monkeypatch.setattr(gpu_setup.sys, "executable", program("python", PIP.format(log=log, build=build)))
            return gpu_setup.main(["--stamp", str(stamp), "--constraints", str(pins), "--pulse", "0.05", *more])

        def calls(self) -> list[str]:
            return log.read_text().splitlines()

    return Node()


def test_a_package_that_fails_does_not_stop_the_other_and_is_not_tried_again(node, capsys):
    assert node.run() == 1
    said = capsys.readouterr().out
    assert "transformer-engine: a wheel if there is one, else built" in said and "FLASH_ATTN_CUDA_ARCHS=90" in said
    assert said.index("a guess") < said.index("installed after"), "what will happen is said before it happens"
    assert "the build failed" in said and "not installed: flash-attn" in said
    calls = node.calls()
    assert [any(name in call for call in calls) for name in ("ninja", "transformer-engine", "flash-attn")] == [True] * 3
    assert all("ARCHS=90" in call for call in calls) and len(calls) == 4
    assert node.run() == 1  # Transformer Engine counts as missing here too: the pretended pip installs nothing
    assert [call.split()[-3] for call in node.calls()[4:] if "ninja" not in call] == [
        "transformer-engine[core_cu13,pytorch]"
    ]
    assert node.run("--force") == 1
    assert sum("flash-attn" in call for call in node.calls()) == 4


def test_a_second_run_compiles_nothing_unless_forced(node, capsys, monkeypatch):
    monkeypatch.setattr(gpu_setup, "MODULES", {"flash-attn": "no_such_fa", "transformer-engine": "json"})
    assert node.run() == 1
    before = len(node.calls())
    capsys.readouterr()
    assert node.run() == 1 and len(node.calls()) == before
    assert "FORCE=1" in capsys.readouterr().out
    monkeypatch.setattr(gpu_setup, "_torch", lambda: ("2.14.0+cu130", "13.0"))
    assert node.run() == 1 and len(node.calls()) > before, "another torch is another try"
    assert node.run("--force", build="exit 0") == 0
    assert "both packages are installed" in capsys.readouterr().out


def test_a_package_that_is_there_now_has_not_failed(node, capsys, monkeypatch):
    assert node.run() == 1
    monkeypatch.setattr(gpu_setup, "MODULES", {"transformer-engine": "math", "flash-attn": "math"})
    monkeypatch.setattr(gpu_setup, "_version", lambda name: "1.0")
    capsys.readouterr()
    assert node.run() == 0
    assert "tried before" not in capsys.readouterr().out


def test_a_jobs_own_memory_counts(tmp_path):
    assert gpu_setup._quota_gb(tmp_path) == math.inf
    (tmp_path / "memory.current").write_text("2000000000\n")
    for most, free in (("max\n", math.inf), ("20000000000\n", 18.0)):
        (tmp_path / "memory.max").write_text(most)
        assert gpu_setup._quota_gb(tmp_path) == free


def test_a_long_build_gives_signs_of_life(node, capsys):
    assert node.run(build="sleep 0.4; exit 0") == 0
    assert "still at work after" in capsys.readouterr().out


def test_what_an_interrupted_run_leaves_is_true(node, monkeypatch, tmp_path):
    """Ctrl-C in the second package: the first one's failure is remembered, the second is tried the next time."""
    real, seen = gpu_setup.perform, []

    def interrupted(step, *rest):
        seen.append(step.package)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return "it did not build" if step.package == "transformer-engine" else real(step, *rest)

    monkeypatch.setattr(gpu_setup, "perform", interrupted)
    with pytest.raises(KeyboardInterrupt):
        node.run()
    assert json.loads((tmp_path / "venv/.gpu.json").read_text())["failed"] == {"transformer-engine": "it did not build"}
    monkeypatch.setattr(gpu_setup, "perform", real)
    node.run()
    assert not any("transformer-engine" in call for call in node.calls()) and "flash-attn" in node.calls()[-1]


def test_without_a_gpu_it_says_so(node, monkeypatch):
    monkeypatch.setattr(gpu_setup, "output_of", lambda command: "")
    with pytest.raises(ConfigError, match="lists no GPU"):
        node.run()


# -------------------------------------------------------------------------------------------------- the Makefile

ROOT = Path(__file__).parents[2]


def dry(*words: str) -> str:
    done = subprocess.run(("make", "-n", *words), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_make_lab_compiles_nothing(tmp_path):
    commands = dry("lab", f"VENV={tmp_path}/v")
    assert "minimegatron lab" in commands and "gpu" not in commands and "nvidia-smi" not in commands


def test_make_gpu_is_asked_for(tmp_path):
    assert f"gpu_setup --stamp {tmp_path}/v/.gpu.json" in dry("gpu", f"VENV={tmp_path}/v")
    assert "--force" in dry("gpu", "FORCE=1", f"VENV={tmp_path}/v")


def test_an_images_own_packages_are_not_pinned(tmp_path):
    """SYSTEM=1 with a Python that has a torch of its own: its pin is dropped, others stay."""
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nprintf 'torch==2.14.0a0+nv26\\nHuggingface_Hub @ file:///x\\nnumpy==2.1.0\\n'\n")
    python.chmod(0o755)
    venv = tmp_path / "v"
    venv.mkdir()
    (venv / "pyvenv.cfg").touch()
    words = ("make", "SYSTEM=1", f"PYTHON={python}", f"VENV={venv}", f"{venv}/constraints.txt")
    subprocess.run(words, cwd=ROOT, capture_output=True, timeout=60, check=True)
    pins = (venv / "constraints.txt").read_text()
    assert "torch==" not in pins and "numpy==" not in pins and "huggingface_hub==" not in pins
    assert "jupyterlab==" in pins and "safetensors==" in pins
    commands = dry("lab", "SYSTEM=1", f"VENV={tmp_path}/w")
    assert "--system-site-packages" in commands and f"--constraint {tmp_path}/w/constraints.txt" in commands


@SLOW
def test_the_module_runs_as_the_makefile_calls_it(tmp_path):
    """On a machine without a GPU: a sentence and status 2, no traceback."""
    pins = tmp_path / "pins.txt"
    pins.write_text("")
    words = (sys.executable, "-m", "minimegatron.kernels.gpu_setup", "--stamp", tmp_path / "s", "--constraints", pins)
    nothing = os.environ | {"PATH": "/nowhere"}
    done = subprocess.run(words, cwd=ROOT, env=nothing, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "lists no GPU" in done.stderr and "Traceback" not in done.stderr
