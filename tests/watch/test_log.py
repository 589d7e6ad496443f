"""A log is read as it grows, whatever happens to the run that writes it."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from minimegatron.errors import DataError
from minimegatron.watch import log as module
from minimegatron.watch.log import RunLog, find_log
from tests.watch.generated import config, norms, records, step, stragglers, write


def steps_of(log: RunLog, name: str = "lm loss") -> dict[int, Any]:
    log.read()
    found = log.columns[name].buckets(0, 1 << 30, 1)
    return dict(zip(found["at"], found["mean"], strict=True))


def simple(i: int, loss: float) -> dict[str, Any]:
    return {"event": "train", "iteration": i, "train_iters": 9, "losses": {"lm loss": loss}, "grad_norm": loss / 2}


def add(path: Path, *lines: dict[str, Any] | str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)


def test_a_run_is_read_on_as_it_trains(tmp_path):
    path = write(tmp_path / "run.jsonl", records(30, layers=2), end=False)
    log = RunLog(find_log(str(tmp_path)))
    assert len(steps_of(log)) == 30 and not log.ended and log.config["machine"]["world_size"] == 1
    text = json.dumps(step(31, random.Random(0)))
    with open(path, "a") as file:
        file.write(text[:40])
        file.flush()
        assert len(steps_of(log)) == 30, "half a line waits"
        file.write(text[40:] + "\n")
    assert list(steps_of(log))[-1] == 31 and log.broken == 0
    held = steps_of(log, "lm loss validation")
    assert len(held) == 30 and log.latest["validation"]["iteration"] == 30
    add(path, {"event": "end", "iteration": 31, "reason": "SIGTERM"})
    log.read()
    assert log.ended and log.lines(0)[-1]["text"] == "the run ended: SIGTERM"


def test_steps_that_repeat_after_a_resume_are_the_later_ones(tmp_path):
    path = tmp_path / "run.jsonl"
    add(path, config(), *(simple(i, 9.0 - i) for i in range(1, 7)))
    add(path, {"event": "validation", "iteration": 6, "losses": {"lm loss": 3.3}})
    log = RunLog(path)
    assert list(steps_of(log)) == [1, 2, 3, 4, 5, 6]
    before = log.generation
    add(path, config(), simple(5, 1.5))
    assert steps_of(log) == {1: 8.0, 2: 7.0, 3: 6.0, 4: 5.0, 5: 1.5}
    assert log.marks == [{"at": 5, "from": 6, "what": "resumed"}] and log.generation > before
    assert len(log.columns["lm loss validation"]) == 0, "of a future that did not come"
    add(path, config(), simple(6, 1.4))
    assert len(steps_of(log)) == 6 and log.marks[-1] == {"at": 6, "from": 5, "what": "resumed"}, "nothing repeats"
    add(path, simple(4, 2.0))
    assert list(steps_of(log)) == [1, 2, 3, 4] and log.marks == [{"at": 4, "from": 6, "what": "rolled back"}]
    assert [line["kind"] for line in log.lines(0) if line["kind"] == "mark"] == ["mark"] * 3


def test_what_is_no_record_is_counted_and_what_is_not_finite_is_a_gap(tmp_path):
    path = tmp_path / "run.jsonl"
    add(path, config(), simple(1, 4.0), "no json", "[1]", '{"event": 3}', '{"iteration": "x", "event": "train"}', "")
    add(path, simple(2, float("nan")), simple(3, float("inf")), simple(4, 2.0), "[" * 100_000)
    with open(path, "ab") as file:
        file.write(b"\xff\xfe\n")
    log = RunLog(path)
    assert steps_of(log) == {1: 4.0, 2: None, 3: None, 4: 2.0}
    assert log.broken == 5 and log.not_finite == 4


def test_a_file_that_becomes_another_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "run.jsonl"
    add(path, config(), simple(1, 4.0), simple(2, 3.0))
    log = RunLog(path)
    assert len(steps_of(log)) == 2
    os.rename(path, tmp_path / "run.jsonl.1")
    with pytest.raises(DataError, match="cannot read"):
        log.read()
    add(path, config(), *(simple(i, 1.0) for i in range(1, 8)))
    assert len(steps_of(log)) == 7, "another file, longer than the first"
    path.write_text("")
    log.read()
    assert not log.columns and log.iteration == 0, "the same file, shorter"


def test_norms_experts_skew_and_numbers_of_a_task_are_curves(tmp_path):
    path = tmp_path / "run.jsonl"
    loads = [{"layer": 1, "tokens": [30, 10, 0, 0]}, {"layer": 2, "tokens": [10, 10, 10, 10]}]
    more = {"norms": norms(1, 2, random.Random(0)), "experts": loads, "reward": 0.5, "epochs": {"a": 1.5, "b": 2.0}}
    add(path, config(), simple(1, 4.0) | more, stragglers(1, 8, 3))
    log = RunLog(path)
    log.read()
    curves = log.curves()["curves"]
    last = {name: curve["mean"][-1] for name, curve in curves.items()}
    wanted = {"lm loss": 4.0, "grad_norm": 2.0, "busiest expert": 3.0, "reward": 0.5, "epoch": 1.5, "skew_ms": 36.0}
    assert last == wanted
    layers = log.layers("update")
    assert list(layers) == list(more["norms"]) and layers["decoder.layers.1"]["at"] == [1]
    assert log.latest["stragglers"]["slow"][0]["rank"] == 3


def test_memory_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "NUMBERS", 3000)
    monkeypatch.setattr(module, "COLUMNS", 10)
    path = write(tmp_path / "run.jsonl", records(1000, layers=3))
    log = RunLog(path)
    log.read(60)
    assert sum(map(len, log.columns.values())) < 3000 and len(log.columns) == 10
    assert len(log.tail) + len(log.steps) <= module.TAIL + module.TAIL // 12
    assert list(steps_of(log, "time"))[-1] == 1000


def test_runs_that_are_none_and_folders_with_several(tmp_path):
    with pytest.raises(DataError, match="there is no run .*nowhere"):
        find_log(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="has no log"):
        find_log(str(tmp_path))
    (tmp_path / "a.jsonl").write_text("")
    assert find_log(str(tmp_path)) == tmp_path / "a.jsonl" == find_log(str(tmp_path / "a.jsonl"))
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(DataError, match=r"several logs: a.jsonl, b.jsonl"):
        find_log(str(tmp_path))
    add(tmp_path / "b.jsonl", config())
    assert find_log(str(tmp_path)) == tmp_path / "b.jsonl", "the other one is no log"
    (tmp_path / "run.jsonl").write_text("")
    assert find_log(str(tmp_path)).name == "run.jsonl"
