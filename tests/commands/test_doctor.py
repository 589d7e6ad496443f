import json
import sys

import pytest

from minimegatron.commands import doctor
from minimegatron.launch import drivers
from minimegatron.launch.drivers import output_of
from minimegatron.layers.attention.choice import Machine, in_words


@pytest.fixture(scope="module")
def facts():
    return doctor.examine()


def test_the_core_works_here(facts, capsys):
    assert facts["broken"] == []
    assert facts["torch"]["version"] and facts["cores"] >= 1


def test_the_report_fits_80_columns_and_names_every_fact(facts):
    text = doctor.report(facts)
    assert max(map(len, text.splitlines())) <= 80
    assert all(word in text for word in ("torch", "gloo", "NCCL", "nvcc", "GPU", *doctor.PACKAGES))
    assert text.endswith("The core works.")


def test_json_is_the_same_as_data(monkeypatch, facts, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: facts)
    assert doctor.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"] == facts


def test_a_broken_core_is_exit_status_1_with_the_reason(monkeypatch, capsys):
    def fail():
        raise RuntimeError("no address for this host")

    monkeypatch.setattr(doctor, "check_gloo", fail)
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "gloo: RuntimeError: no address for this host" in out and "The core does not work." in out


def test_without_torch_the_doctor_still_answers(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor.main([]) == 1
    assert "pip install --constraint constraints.txt torch" in capsys.readouterr().out


GPU = {"gpus": ["NVIDIA H200, 143771 MiB, 580.95"], "nvcc": None}


def test_a_gpu_that_torch_cannot_use_is_told_with_the_reason(facts):
    torch = {"version": "2.13.0+cu130", "build": "CUDA 13.0", "gpus": 0, "nccl": True}
    reason = drivers.obstacle(["NVIDIA H100, 81559 MiB, 535.104.05"], torch["version"], "13.0", {})
    said = dict(doctor.advice({**facts, **GPU, "torch": {**torch, "obstacle": reason}}))
    assert "CUDA 13.0, which needs driver 580" in said["torch for the GPU"] and "cu126" in said["torch for the GPU"]
    assert "nvcc" in said and said["Transformer Engine, flash-attn"].startswith("make gpu")
    assert "GPU" not in said
    hidden = dict(doctor.advice({**facts, **GPU, "torch": {**torch, "obstacle": None}}))
    assert hidden["torch for the GPU"] == "CUDA_VISIBLE_DEVICES hides the GPU: unset it"


def test_torch_is_asked_why_where_a_gpu_is_listed(monkeypatch):
    """Here torch is a build for CPUs or sees no GPU, so a GPU that nvidia-smi lists is one that it cannot use."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert doctor.examine_torch([])["obstacle"] is None
    assert (
        "nvidia-smi lists 1 GPU with driver 535.104.05" in doctor.examine_torch(["A, 1 MiB, 535.104.05"])["obstacle"][0]
    )


def test_a_gpu_that_works_is_used(facts):
    torch = {"version": "2.13.0", "build": "CUDA 13.0", "gpus": 2, "nccl": True}
    machine = {**facts, **GPU, "torch": torch}
    assert dict(doctor.ways(machine))["ranks"].startswith("NCCL, one GPU a rank: torchrun --nproc-per-node 2")
    assert max(map(len, doctor.report(machine).splitlines())) <= 80


def test_how_kernels_run_is_told(facts):
    assert facts["kernels"].keys() == {"cuda", "emulated", "cpu"}
    on_gpu = {**facts, **GPU, "torch": {"version": "2.13.0", "build": "CUDA 13.0", "gpus": 1, "nccl": True}}
    free = dict.fromkeys(("cuda", "emulated", "cpu"))
    blocked = {"cuda": "this machine has no nvcc", "emulated": "no g++", "cpu": "no g++"}
    plain = {"kernels_in_wheel": False}
    machines = [{**machine, **plain, "kernels": k} for machine in (facts, on_gpu) for k in (free, blocked)]
    said = [dict(doctor.ways(machine))["kernels"] for machine in machines]
    assert said == [
        "for CPUs, built when first used; CUDA's emulated to learn with: kernels=emulated",
        "torch's: no g++; CUDA's emulated to learn with: no g++",
        "CUDA, built when first used",
        "torch's: this machine has no nvcc",
    ]
    said = dict(doctor.ways({**facts, "kernels": free, "kernels_in_wheel": True}))["kernels"]
    assert said.startswith("for CPUs, compiled in the wheel; ")


def test_the_compiler_is_told_with_its_origin(monkeypatch):
    monkeypatch.setattr(doctor.toolkit, "nvcc", lambda: doctor.toolkit.Nvcc("/opt/conda/bin/nvcc", "conda"))
    monkeypatch.setattr(doctor, "output_of", lambda command, seconds: "Cuda compilation tools, release 12.8, V12.8.93")
    assert doctor.nvcc_version() == "12.8, from conda: /opt/conda/bin/nvcc"
    monkeypatch.setattr(doctor.toolkit, "nvcc", lambda: None)
    assert doctor.nvcc_version() is None


@pytest.mark.parametrize("capability,installed,wanted", [
    (
        (9, 0),
        {"flash", "varlen"},
        "sm_90: torch's scaled_dot_product_attention (cuDNN first); documents and windows: flash-attn",
    ),
    ((8, 0), {"varlen"}, "sm_80: torch's scaled_dot_product_attention; documents and windows: torch's varlen_attn"),
    ((8, 0), {"flash"}, "sm_80: flash-attn; documents and windows: flash-attn"),
    (None, set(), "torch's scaled_dot_product_attention"),
])  # fmt: skip
def test_what_computes_attention_is_told(facts, capability, installed, wanted):
    assert in_words(Machine(capability, frozenset(installed))) == wanted
    assert dict(doctor.ways({**facts, "attention": wanted}))["attention"] == wanted


def test_what_a_system_without_proc_cannot_do_is_told(facts, monkeypatch):
    assert dict(doctor.ways(facts))["ends of ranks"] == "a job leaves no process behind, however it ends"
    monkeypatch.setattr(sys, "platform", "darwin")
    elsewhere = {**facts, "limits": doctor.limits()}
    assert "a daemon that a rank has started outlives the job" in dict(doctor.ways(elsewhere))["ends of ranks"]
    assert max(map(len, doctor.report(elsewhere).splitlines())) <= 80


def test_a_quota_cuts_the_cores(tmp_path):
    everything = doctor.usable_cores(tmp_path)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert doctor.usable_cores(tmp_path) == everything
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert doctor.usable_cores(tmp_path) == 1


def test_commands_that_are_absent_or_fail_say_nothing():
    assert output_of(("no-such-command-anywhere",)) == ""
    assert output_of((sys.executable, "-c", "print('x'); raise SystemExit(3)")) == ""
    assert output_of((sys.executable, "-c", "print('x')")) == "x\n"
