"""Benchmarks run, check before they time, and never fail by a time."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import bubble, contenders, generate, gpu, gpu_decode, moe, overhead, ring, train
from benchmarks.paired import paired
from minimegatron.comm.mesh import Mesh
from minimegatron.inference import decode
from minimegatron.models.decoder import build_model
from minimegatron.models.zoo import family_config
from tests.recorder import OnACpu


def test_the_gpu_benchmark_runs_on_a_machine_without_one(tmp_path, capsys, monkeypatch):
    path = tmp_path / "rows.json"
    monkeypatch.setattr("sys.argv", ["gpu", "--smoke", "--json", str(path)])
    assert gpu.main() == 0
    out = capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert "training step" in out and "WRONG" not in out
    wanted = {"copy", "RMSNorm, backward", "AdamW, main and bf16", "FP8 linear, delayed, both ways"}
    wanted |= {"decode, batch 1"}
    wanted |= {f"training step, {way}" for way in ("bf16", "bf16, torch alone", "FP8 delayed", "FP8 tensorwise")}
    assert wanted <= {row["what"] for row in rows} and len(rows) > 30
    assert all(row["milliseconds"] > 0 for row in rows)


def test_a_wrong_layer_is_found_and_nothing_is_timed(capsys, monkeypatch):
    right = gpu.Norm.forward
    monkeypatch.setattr(gpu.Norm, "forward", lambda self, x: right(self, x) * (1 + 1e-3 * (x.dtype == torch.float32)))
    monkeypatch.setattr("sys.argv", ["gpu", "--smoke"])
    assert gpu.main() == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and "training step" not in out


def test_a_part_that_fails_leaves_the_others_their_rows(tmp_path, capsys, monkeypatch):
    def broken(*args):
        yield "norm, clip and AdamW", 1.0, 1e9, None
        raise RuntimeError("no such GPU")

    monkeypatch.setattr(gpu.gpu_training, "measure", broken)
    monkeypatch.setattr(gpu, "check_all", lambda device: [])
    monkeypatch.setattr(gpu, "check_kernels", lambda device: True)
    monkeypatch.setattr(gpu, "time_kernels", lambda *args: iter(()))
    monkeypatch.setattr("sys.argv", ["gpu", "--smoke", "--json", str(tmp_path / "new" / "rows.json")])
    assert gpu.main() == 1
    found = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert found["failed"] == ["training"] and "FAILED, RuntimeError: no such GPU" in capsys.readouterr().out
    assert {"norm, clip and AdamW", "core attention, causal, forward"} <= {row["what"] for row in found["rows"]}


def test_every_way_to_decode_is_held_against_the_first(monkeypatch):
    def timer(run, device, repeats):
        return run() and 4.0

    monkeypatch.setattr(gpu_decode, "STEPS", 4)

    monkeypatch.setattr(decode, "compile_whole", lambda run: run)
    rows = list(gpu_decode.measure(torch.device("cpu"), True, timer, OnACpu))
    assert [row[0] for row in rows] == ["decode, batch 1" + way for way in gpu_decode.WAYS]
    assert [row[1] for row in rows] == [1.0] * 3 and [row[3] for row in rows] == [None, 1.0, 1.0]
    model = build_model(family_config("llama", **gpu_decode.TINY), Mesh.serial(), 0)
    kept = 2 * 32 * 2 * 2 * 16  # layers, rows, keys and values, groups, channels
    assert rows[0][2] == 1e3 * 2 * (sum(p.numel() for p in model.parameters()) + kept)
    monkeypatch.setattr(decode, "compile_whole", lambda run: lambda: [x * 2 for x in run()])
    with pytest.raises(RuntimeError, match="compiled, one CUDA graph: log-probabilities are off by"):
        list(gpu_decode.measure(torch.device("cpu"), True, timer, OnACpu))


def test_generation_is_compared_where_the_words_are_the_same(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["generate", "--smoke"])
    generate.main()
    assert "words per CPU-second" in capsys.readouterr().out
    made = generate.StaticEngine.generate
    monkeypatch.setattr(generate.StaticEngine, "generate", lambda self, prompts, new: made(self, prompts, new - 1))
    with pytest.raises(SystemExit, match="other words"):
        generate.main()


def test_pairs_alternate_and_their_ratio_survives_a_slow_neighbour():
    order: list[str] = []

    def contender(name: str, cost: float) -> float:
        order.append(name)
        drift = 1 + len(order) // 4  # the machine gets slower and slower
        return cost * drift

    ratio = paired(lambda: contender("a", 1.0), lambda: contender("b", 1.5), pairs=6, warmups=1)
    assert "".join(order) == "ab" + "abba" * 3
    assert ratio.median == pytest.approx(1.5, rel=0.5) and ratio.low <= ratio.median <= ratio.high


def test_both_contenders_train_the_same_model():
    """Same sizes, same tokens: otherwise the comparison means nothing."""
    work = contenders.SMOKE
    step = contenders.our_step(work, Mesh.serial())
    step()
    ours = sum(p.numel() for p in build_model(work.config, Mesh.serial(), seed=0).parameters())
    theirs = contenders.hugging_face_model(work)
    padding = work.config.padded_vocab_size(1) - work.config.vocab_size
    assert ours - 2 * padding * work.config.hidden_size == sum(p.numel() for p in theirs.parameters())
    contenders.hugging_face_step(work)()


def test_the_ring_benchmark_runs(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["ring", "--smoke"])
    ring.main()
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 6 and all(0 < float(line.split()[-1]) < 1 for line in lines)


def test_the_bubble_of_every_schedule_is_measured_beside_its_prediction(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bubble", "--smoke"])
    bubble.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "predicted" in line]
    predicted = {line[4]: line[6] for line in lines}
    assert predicted == {
        "gpipe": "0.2500", "1f1b": "0.2500", "interleaved": "0.1250",
        "zb_h1": "0.0833", "zb_v": "0.0417", "dualpipe_v": "0.0417",
    }  # fmt: skip
    assert all(float(line[8]) > 0 for line in lines), "idle time cannot be negative: sleeps are never too short"


def test_training_is_compared_in_every_layout(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train", "--smoke", "--only", "hf", "tp2", "pp2"])
    train.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all("tokens per CPU-second" in line for line in lines[1:])


@pytest.mark.thorough
def test_the_price_of_doing_nothing_is_measured(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["overhead", "--smoke"])
    overhead.main()
    out = capsys.readouterr().out
    assert "group of one" in out and "CPU-s" in out and "4 warm ranks" in out


def test_bytes_of_the_dispatch_are_counted_beside_their_formula(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["moe", "--smoke"])
    moe.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum("as the formula says" in line for line in lines) == 10 and not any("WRONG" in line for line in lines)
    assert sum("dropless over dropping" in line for line in lines) == 2
