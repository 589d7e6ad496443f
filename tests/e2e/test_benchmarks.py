"""Benchmarks run, check before they time, and never fail by a time."""

from __future__ import annotations

import math

import pytest

from benchmarks import (
    bubble,
    checkpoint,
    contenders,
    generate,
    moe,
    overhead,
    overlap,
    posttraining,
    ring,
    serving,
    train,
)
from labkit.paired import paired
from minimegatron.comm.mesh import Mesh
from minimegatron.models.decoder import build_model


def test_generation_is_compared_where_the_words_are_the_same(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["generate", "--smoke"])
    generate.main()
    assert "words per CPU-second" in capsys.readouterr().out
    made = generate.generate
    monkeypatch.setattr(generate, "generate", lambda engine, prompts, new: made(engine, prompts, new - 1))
    with pytest.raises(SystemExit, match="other words"):
        generate.main()


@pytest.mark.thorough
def test_serving_is_compared_where_greedy_words_are_the_same(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["serving", "--smoke", "--pairs", "2"])
    serving.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all("CPU-s for" in line for line in lines[1:])
    assert [line.endswith("6 of 6 answers with the same words") for line in lines[1:]] == [True, True, False, False]
    monkeypatch.setattr(serving, "ours", lambda load, sampled: lambda: [[0] * n for n in load.drawn()[1]])
    with pytest.raises(SystemExit, match="0 of 6 greedy answers have the same words"):
        serving.main()
    monkeypatch.setattr(serving, "ours", lambda load, sampled: lambda: [[0]] * load.requests)
    with pytest.raises(SystemExit, match="not as long"):
        serving.main()


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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_overlap_is_measured_on_a_network_that_takes_its_time(capsys, monkeypatch):
    """24 ms of work; a reduce-scatter or an all-gather of 4.8 ms; ZeRO-3 gathers its layers, 8/9 of it, once more."""
    monkeypatch.setattr("sys.argv", ["overlap", "--smoke", "--link", "0.2"])
    overlap.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("link")]
    busy = [float(line[line.index("network") + 1]) for line in lines]
    assert busy == pytest.approx([9.6] * 8 + [4.8 * (2 + 8 / 9)] * 3, abs=0.1)
    alone = [float(line[line.index("ms") - 1]) - b for line, b in zip(lines, busy, strict=True) if "nothing" in line]
    assert len(alone) == 4 and min(alone) > 24, "where nothing overlaps a step is its work and its messages"


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


@pytest.mark.thorough
def test_bytes_of_the_dispatch_are_counted_beside_their_formula(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["moe", "--smoke"])
    moe.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum("as the formula says" in line for line in lines) == 10 and not any("WRONG" in line for line in lines)
    assert sum("dropless over dropping" in line for line in lines) == 2


def test_checkpoints_are_compared_with_torchs_own(capsys, tmp_path):
    checkpoint.main(["--megabytes", "2", "--pairs", "2", "--passes", "0.1", "--folder", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "64 tensors, 2 MB" and len(lines) == 17
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["sft", pytest.param("grpo", marks=pytest.mark.thorough)])
def test_our_side_of_the_comparison_with_trl_trains_the_lines_that_both_have(name, tmp_path):
    posttraining.prepare(tmp_path, posttraining.SMALL)
    clock = posttraining.COMPARISONS[name][0](tmp_path, posttraining.SMALL)
    assert clock.seconds > 0
    lines = (tmp_path / "conversations.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == posttraining.SMALL.conversations
    if name == "sft":  # random weights
        assert clock.loss == pytest.approx(math.log(320), rel=0.05)
