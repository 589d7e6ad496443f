"""The benchmark of a GPU: it runs to its end on a machine without one, and no part costs another its figures."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_cases, gpu_collectives, gpu_decode, gpu_layers, gpu_parts, gpu_training
from benchmarks.gpu_parts import Found, Part, Row
from labkit.ranks.torchrun import Run
from minimegatron.comm.mesh import Mesh
from minimegatron.inference import runner as decode
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from tests.recorder import OnACpu
from tests.rehearsal import rehearse

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# On the simulated device nothing can be compiled for a GPU: the code around it runs, on what was to be compiled.
ON_A_GPU = """
import sys
import torch
from benchmarks import gpu
from minimegatron.inference import runner as decode
torch.compile = lambda function, **_: function
torch.nn.Module.compile = lambda self, **_: None
decode.compile_whole = lambda run: run
sys.exit(gpu.main())
"""


def files(folder: Path) -> tuple[dict[str, Any], set[str]]:
    """What a run left, and what its rows are of; the rows for RECORDS.md are the same."""
    found = json.loads((folder / "gpu.json").read_text())
    what = [row["what"] for row in found["rows"]]
    lines = (folder / "gpu.md").read_text().split("\n")[:-1]
    assert [line.split(" | ")[4] for line in lines] == what and all(line.count(" | ") == 6 for line in lines)
    return found, set(what)


@pytest.mark.thorough  # the whole run below has it
def test_layers_are_right_and_timed_on_a_gpu(tmp_path: Path) -> None:
    said = rehearse(ON_A_GPU, args=["--smoke", "--only", "layers", "--out", str(tmp_path)], timeout=600)
    found, rows = files(tmp_path)
    assert found["failed"] == {} and said.stdout.count("  error ") == 14 and "WRONG" not in said.stdout
    assert {"copy", "core attention, causal, backward", "cross entropy layer, forward"} <= rows
    assert found["device"] == "NVIDIA H100 80GB HBM3" and found["gpus"] == 1


@pytest.mark.thorough
def test_it_runs_to_its_end_on_a_gpu(tmp_path: Path) -> None:
    """On a simulated one: every part but the building of kernels, at small sizes."""
    said = rehearse(ON_A_GPU, args=["--seconds=10000", "--smoke", "--profile", "--out", str(tmp_path)], timeout=1200)
    found, rows = files(tmp_path)
    assert found["failed"] == {} and "WRONG" not in said.stdout, said.stdout
    assert set(found["left_out"]) == {
        "kernels, built", "training, FP8 delayed, Transformer Engine", "collectives"
    }  # fmt: skip
    assert "they need 2 GPUs, and this machine has 1" in said.stdout
    wanted = {f"training step, {way}" for way in gpu_training.WAYS if "Engine" not in way}
    wanted |= {f"decode, batch 1{way}" for way in gpu_decode.WAYS}
    ways = ("", " beside torch.compile")
    cases = [case.name for case in gpu_cases.cases()]
    wanted |= {f"{name}, {direction}{way}" for name in cases for direction in ("forward", "backward") for way in ways}
    wanted |= {"copy", "matrix product", "norm, clip and AdamW", "AdamW, main and bf16", "squared norm"}
    wanted |= {"FP8 linear, current, both ways", "core attention, causal, backward", "cross entropy layer, forward"}
    assert wanted <= rows
    assert all(row["milliseconds"] > 0 for row in found["rows"])


@pytest.mark.thorough
def test_it_runs_to_its_end_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--seconds=10000", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    found, rows = files(tmp_path)
    assert {"training step, FP8 tensorwise", "decode, batch 1", "RMSNorm, backward"} <= rows and found["gpus"] == 0


def test_the_full_run_is_refused_without_a_gpu(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no GPU here; --smoke" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- the parts


def row(what: str) -> Row:
    return Row(what, 1.0, 2.0, "GB/s")


def played(*parts: Part, seconds: float = 1000.0) -> tuple[Found, list[str]]:
    found, said = Found(), list[str]()
    gpu_parts.play_all(list(parts), found, lambda: seconds, said.append, lambda: None)
    return found, said


def test_a_part_that_fails_leaves_the_others_their_rows() -> None:
    def raises(found: Found) -> Any:
        yield row("before")
        yield {"micro-batch": 4}
        raise RuntimeError("no such GPU\nand more")

    def dies(found: Found) -> Any:
        yield row("before it died")
        os.kill(os.getpid(), signal.SIGSEGV)

    def leaves(found: Found) -> Any:
        os._exit(3)
        yield

    def hangs(found: Found) -> Any:
        yield row("before it hung")
        time.sleep(600)

    def last(found: Found) -> Any:
        yield f"{sorted(found.rows)} {found.facts}"
        yield row("last")

    parts = [Part("raises", raises), Part("dies", dies), Part("leaves", leaves), Part("hangs", hangs, limit=4.0)]
    found, said = played(*parts, Part("last", last))
    assert list(found.rows) == ["before", "before it died", "before it hung", "last"]
    assert found.failed == {
        "raises": "RuntimeError: no such GPU", "dies": "was killed by SIGSEGV", "leaves": "left with exit status 3",
        "hangs": "took longer than 4 s",
    }  # fmt: skip
    assert "  ['before', 'before it died', 'before it hung'] {'micro-batch': 4}" in said
    assert "raises: FAILED, RuntimeError: no such GPU" in said


def test_nothing_begins_that_would_take_longer_than_there_is_time() -> None:
    parts = Part("long", lambda found: iter([row("long")]), needs=50), Part("short", lambda found: iter([row("short")]))
    found, said = played(*parts, seconds=20)
    assert list(found.rows) == ["short"] and "long: left out, 20 s are left, it takes about 50" in said


def test_a_failure_is_in_the_files_and_in_the_exit_status(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    def wrong(found: Found) -> Any:
        yield "RMSNorm  WRONG"
        raise RuntimeError("WRONG: RMSNorm in bf16")

    machine = Part("the machine", lambda found: iter([{"device": "a GPU"}, row("copy")]))
    parts = [machine, Part(gpu.LAYERS, wrong), Part("training", lambda found: iter([row("step")]))]
    monkeypatch.setattr(gpu, "plan", lambda *_: parts)
    monkeypatch.setattr("sys.argv", ["gpu", "--smoke", "--out", str(tmp_path / "new")])
    assert gpu.main() == 1
    found, rows = files(tmp_path / "new")
    assert found["failed"] == {gpu.LAYERS: "RuntimeError: WRONG: RMSNorm in bf16"} and rows == {"copy", "step"}
    assert "layers were WRONG in this run" in (tmp_path / "new" / "gpu.md").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == f"FAILED: {gpu.LAYERS}: RuntimeError: WRONG: RMSNorm in bf16"


def test_the_default_plan_ends_within_ten_minutes() -> None:
    """A part may begin when what it needs is left, and may then take its limit."""
    parts = gpu.plan(torch.device("cuda"), smoke=False, profile=False)
    assert max(480 - part.needs + part.limit for part in parts if part.name != "kernels, built") <= 590


# ------------------------------------------------------------------------------------------------- what is in a part


def test_a_wrong_layer_is_found(monkeypatch: Any) -> None:
    right = gpu_layers.Norm.forward
    wrong = lambda self, x, *r: right(self, x, *r) if r else right(self, x) * (1 + 1e-3 * (x.dtype == torch.float32))  # noqa: E731
    monkeypatch.setattr(gpu_layers.Norm, "forward", wrong)
    lines: list[str] = []
    with pytest.raises(RuntimeError, match="WRONG: RMSNorm in fp32, LayerNorm in fp32, layer in fp32"):
        for line in gpu_layers.check_all(CPU):
            lines.append(line)
    assert len(lines) == 14 and sum("WRONG" in line for line in lines) == 3


def test_a_wrong_kernel_is_found_and_not_timed(monkeypatch: Any) -> None:
    case = dataclasses.replace(gpu_cases.cases()[0], fused=lambda x, g: x * g)
    monkeypatch.setattr(gpu.gpu_kernels, "time_case", lambda *_, **__: pytest.fail("it was timed"))
    with pytest.raises(RuntimeError, match="WRONG: RMSNorm in float32 and bfloat16"):
        list(gpu.kernel(case, CPU, True, Found()))


def test_a_kernel_that_cannot_be_built_leaves_the_others_theirs(monkeypatch: Any) -> None:
    def library(name: str, target: str) -> None:
        if name == "norm":
            raise OSError("no space left\non this disk")

    monkeypatch.setattr(gpu.build, "library", library)
    built: list[str] = []
    with pytest.raises(RuntimeError, match="^norm: no space left$"):
        for line in gpu.build_kernels():
            built.append(str(line).split()[0])
    assert sorted(built) == [name for name in gpu.build.sources() if name != "norm"]


def test_every_way_to_decode_is_held_against_the_first(monkeypatch: Any) -> None:
    def timer(run: Any, device: Any, repeats: int) -> float:
        return bool(run()) and 4.0

    def rows(compiled: bool) -> list[Row]:
        yielded = gpu_decode.measure(CPU, True, timer, OnACpu, compiled, found)
        return [each for each in yielded if isinstance(each, Row)]

    found = Found({"copy": Row("copy", 1.0, 10.0, "GB/s")})
    monkeypatch.setattr(gpu_decode, "STEPS", 4)
    monkeypatch.setattr(decode, "compile_whole", lambda run: run)
    eager, graph = rows(False)
    assert [eager.what, graph.what] == ["decode, batch 1", "decode, batch 1, one CUDA graph"]
    assert (eager.milliseconds, eager.against, graph.against) == (1.0, {}, {"no graph": 1.0})
    assert [each.what for each in rows(True)] == ["decode, batch 1, compiled, one CUDA graph"]
    model = build_model(family_config("llama", **gpu_decode.TINY), Mesh.serial(), 0)
    kept = 2 * 32 * 2 * 2 * 16  # layers, rows, keys and values, groups, channels
    assert eager.rate == pytest.approx(2e-6 * (sum(p.numel() for p in model.parameters()) + kept))
    assert eager.share == pytest.approx(eager.rate / 10)
    monkeypatch.setattr(decode, "compile_whole", lambda run: lambda: [x * 2 for x in run()])
    with pytest.raises(RuntimeError, match="compiled, one CUDA graph: log-probabilities are off by"):
        rows(True)


def test_a_way_that_needs_a_smaller_micro_batch_is_compared_by_sequences(monkeypatch: Any) -> None:
    """Where 8 sequences take 80 ms, 4 in 80 ms are half as fast."""
    found = Found({"training step, bf16": Row("training step, bf16", 80.0, 1.0, "TFLOP/s")}, {"micro-batch": 8})
    monkeypatch.setattr(gpu_training, "_largest", lambda *_: (4, 80.0))
    *_, step = gpu_training.measure("bf16, torch alone", CPU, True, lambda *_: 80.0, found)
    assert isinstance(step, Row) and step.against == {"bf16": 0.5}


@pytest.mark.thorough
def test_collectives_are_timed_on_two_gpus(tmp_path: Path) -> None:
    said = rehearse(ROOT / "benchmarks" / "gpu_collectives.py", 2, args=["4096", "65536"]).report
    assert {name: len(times) for name, times in said.items()} == {"all-reduce": 2, "all-gather": 2, "reduce-scatter": 2}


def test_bus_bandwidth_is_what_a_ring_sends(tmp_path: Path, monkeypatch: Any) -> None:
    """1 GB among 4: an all-reduce sends 1.5 GB from each rank, the others half of that; in 10 ms."""
    run = Run("", Path(), 4, 60.0, True, "nccl", reports=[{"all-reduce": [10.0], "all-gather": [10.0]}])
    monkeypatch.setattr(gpu_collectives, "launch", lambda *_, **__: run)
    remark, *rows = gpu_collectives.measure(4, tmp_path, {"1 GB": 10**9})
    assert remark == "4 ranks on GPUs (NCCL); 0.0 s from start to end"
    assert [(r.what, r.rate) for r in rows if isinstance(r, Row)] == [
        ("all-reduce over 4 GPUs, 1 GB", pytest.approx(150.0)), ("all-gather over 4 GPUs, 1 GB", pytest.approx(75.0)),
    ]  # fmt: skip
