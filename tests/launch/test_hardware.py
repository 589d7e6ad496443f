"""Which backend and GPU ranks choose from what they all see, and what is said where GPUs cannot be used."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from minimegatron.errors import ConfigError
from minimegatron.launch import drivers, hardware
from minimegatron.launch.hardware import Look, choose

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def _a_build_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def node(host: str, ranks: int, gpus: int) -> list[Look]:
    """Every rank sees all GPUs of its machine."""
    return [Look(host, tuple(f"{host}-{i}" for i in range(gpus)), H100 if gpus else "")] * ranks


def gpus_of(looks: list[Look], backend: str | None = None) -> list[int | None]:
    choices = [choose(backend, rank, [Look.from_json(look.to_json()) for look in looks]) for rank in range(len(looks))]
    assert {choice.backend for choice in choices} == {"nccl"}
    return [choice.gpu for choice in choices]


def test_ranks_take_the_gpus_of_their_machine_in_order():
    assert gpus_of([*node("a", 4, 8), *node("b", 2, 8)]) == [0, 1, 2, 3, 0, 1]
    choice = choose(None, 5, [*node("a", 4, 8), *node("b", 2, 8)])
    assert (choice.local_rank, choice.local_world) == (1, 2)
    assert choice.description == f"NCCL: 6 ranks on 2 machines, 2 on this one; rank 5 on cuda:1 of 8 ({H100})"


def test_one_visible_gpu_a_task_is_the_first_of_each():
    tasks = [Look("a", (f"a-{i}",), H100) for i in range(4)]
    assert gpus_of(tasks) == [0, 0, 0, 0]
    halves = [Look("a", gpus, H100) for gpus in (("0", "1"), ("0", "1"), ("2", "3"), ("2", "3"))]
    assert gpus_of(halves) == [0, 1, 0, 1]


def test_machines_of_one_name_are_told_apart():
    first, second = (dataclasses.replace(node("localhost", 1, 2)[0], boot=boot) for boot in "ab")
    other = dataclasses.replace(second, gpus=("c", "d"))
    assert gpus_of([first, first, other, other]) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("looks", "backend", "said"),
    [
        (node("a", 4, 1), None, r"4 ranks on a share 1 GPU: NCCL wants one for each\n  fix: start 1 there; --distrib"),
        (node("a", 4, 2), "nccl", "4 ranks on a share 2 GPUs"),
        ([*node("a", 2, 2), *node("b", 2, 0)], None, "NCCL needs a GPU for each rank, and rank 2 on b sees none"),
        (node("a", 2, 0), "nccl", "NCCL needs a GPU for each rank, and rank 0 on a sees none"),
        ([Look("a", obstacle="too old", fix="mend it")], None, "too old\n  fix: mend it; --distributed-backend gloo"),
        ([Look("a", obstacle="too old", fix="mend it")], "nccl", "too old"),
    ],
)
def test_gpus_that_would_not_be_used_are_no_reason_for_the_cpu(looks, backend, said):
    messages = set()
    for rank in range(len(looks)):
        with pytest.raises(ConfigError, match=said) as caught:
            choose(backend, rank, looks)
        messages.add(str(caught.value))
    assert len(messages) == 1, "all ranks say the same, so one of them is enough to read"


def test_the_cpu_where_there_is_no_gpu_or_where_it_is_asked_for(monkeypatch):
    assert choose(None, 1, node("a", 2, 0)).description == "gloo on the CPU (no GPU here): 2 ranks on 1 machine"
    assert choose("gloo", 0, node("a", 4, 1)).description == "gloo on the CPU (as asked): 4 ranks on 1 machine"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES hides all GPUs" in choose(None, 0, [hardware.look(None)]).description


def test_without_nccl_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="sees GPUs and has no NCCL"):
        choose(None, 0, node("a", 1, 1))


def test_who_asks_for_gloo_does_not_look(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("CUDA was begun"))
    assert hardware.look("gloo").gpus == ()


def test_a_gpu_that_torch_cannot_use_is_an_obstacle(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(drivers, "nvidia_smi", lambda: [f"{H100}, 81559 MiB, 535.104.05"] * 4)
    seen = hardware.look(None)
    assert seen.gpus == () and seen.obstacle.startswith("nvidia-smi lists 4 GPUs with driver 535.104.05")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.look(None).obstacle == ""


# ------------------------------------------------------------------------------------------------------- drivers


@pytest.mark.parametrize(
    ("driver", "version", "cuda", "visible", "what", "fix"),
    [
        ("570.86.15", "2.13.0+cu130", "13.0", None, "built for CUDA 13.0, which needs driver 580", "+cu126, or"),
        ("470.82", "2.12.0+cu126", "12.6", None, "needs driver 525.60.13", "a driver of 525.60.13 or newer"),
        ("580.65.06", "2.13.0+cpu", None, None, "is no build for CUDA", "+cu130, or +cu126"),
        ("535.104", "2.13.0+cpu", None, None, "is no build for CUDA", "+cu126, or another build for CUDA 12"),
        ("580.65.06", "2.13.0+cu130", "13.0", "9", "CUDA_VISIBLE_DEVICES=9 names none", "unset it"),
        ("580.65.06", "2.13.0+cu130", "13.0", None, "new enough for torch 2.13.0+cu130, which sees none", "cuda.init"),
        ("999", "9+cu150", "15.0", None, "new enough", "cuda.init"),
    ],
)
def test_why_torch_uses_none_of_the_gpus(driver, version, cuda, visible, what, fix):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    said = drivers.obstacle([f"{H100}, 81559 MiB, {driver}"], version, cuda, environ)
    assert said is not None and what in said[0] and fix in said[1] and driver in said[0]


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_gpus_that_are_hidden_or_absent_are_no_obstacle(visible):
    assert drivers.obstacle([f"{H100}, 1 MiB, 535"], "2.13", "13.0", {"CUDA_VISIBLE_DEVICES": visible}) is None
    assert drivers.obstacle([], "2.13", "13.0", {}) is None


def test_pipelines_on_gpus_load_kernels_early_and_have_queues_for_their_edges():
    environ: dict[str, str] = {}
    assert hardware.prepare_for_pipelines(environ) == ""
    assert environ == {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    own = {"CUDA_MODULE_LOADING": "LAZY", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert "unset it" in hardware.prepare_for_pipelines(own) and own["CUDA_MODULE_LOADING"] == "LAZY"
