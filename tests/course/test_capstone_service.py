"""Capstone 04: a right deployment gets every point, and each fault loses those of its criterion, and is told why.

The deployments here are processes without a model; the reference solution, with one, is `thorough`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from labkit import acceptance
from minimegatron.errors import ConfigError, DataError
from tests.course.fake_service import answer
from tests.thorough import SLOW, mostly_thorough

ROOT = Path(__file__).resolve().parents[2]
SERVICE = importlib.import_module("course.capstones.04_service")
CRITERIA = importlib.import_module("course.capstones.04_service.criteria")
DEPLOYMENT = importlib.import_module("course.capstones.04_service.deployment")
FAKE = f"env PYTHONPATH={ROOT} {{python}} -m tests.course.fake_service {{port}} {{deadline}}"
WHY = "A step of the fake takes a millisecond however many requests are in it, so 64 at once take what one takes."
RIGHT = {"service": "router", "one_replica": "replica", "no_batching": "serial"}
NUMBERS = {"latency": 1.5, "batching": 8, "replicas": 1}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A quarter of everything."""
    sizes = {
        "STREAMS": 16,
        "TOKENS": 16,
        "FLOOD": 80,
        "WORKED": 0.01,
        "EMPTY_SECONDS": 1.0,
        "WARM_SECONDS": 1.0,
        "COMPARED": 0.15,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(CRITERIA, name, value)


def plan(
    folder: Path, fault: str = "", promise: float = 30, measured: dict = NUMBERS, why: str = WHY, **kinds: str
) -> Path:
    lines = ["[start]"]
    lines += [f"{kind} = \"{FAKE} {how} '{fault}'\"" for kind, how in {**RIGHT, **kinds}.items()]
    lines += ["[promise]", f"latency = {promise}", "[report]", f"why = {json.dumps(why)}", "[predicted]"]
    lines += [f"{name} = 2" for name in NUMBERS]
    lines += ["[measured]", *(f"{name} = {value}" for name, value in measured.items())]
    (folder / "deploy.toml").write_text("\n".join(lines) + "\n")
    return folder


def graded(folder: Path, *only: str, seed: int = 0) -> dict[str, acceptance.Result]:
    random = Random(seed)
    words = {
        prompt: CRITERIA.Words(answer(prompt, CRITERIA.TOKENS), CRITERIA.TOKENS, "length")
        for prompt in CRITERIA.drawn_prompts(random)
    }
    handed_in = DEPLOYMENT.read_plan(folder / "deploy.toml")
    session = CRITERIA.Session(folder, folder, handed_in, random, words, soak=0.5, logs=folder)
    criteria = [c for c in SERVICE.CAPSTONE.criteria if not only or c.name in only]
    found: list[acceptance.Result] = []
    asyncio.run(CRITERIA.try_all(session, criteria, found.append))
    assert [result.criterion for result in found] == criteria
    return {result.criterion.name: result for result in found}


@SLOW
@pytest.mark.thorough
def test_a_right_deployment_gets_every_point(tmp_path):
    results = graded(plan(tmp_path))
    lost = {name: result.told for name, result in results.items() if not result.met}
    if "report" in lost:  # the one criterion about this machine's own speed
        assert re.fullmatch(r"(\w+ was measured as [\d.]+ by you and as [\d.e+]+ here(; )?)+", lost.pop("report"))
    assert not lost and acceptance.of(SERVICE.CAPSTONE.criteria) == 100


# kind of the service, its faults, and what each criterion says of them
FAULTS = [
    (
        "replica",
        "drops stop, no retry-after, leaks pages, cuts",
        {
            "stop": r"answer with stop='.*' ends with",
            "queue": "have no Retry-After",
            "soak": "after the last request vllm:kv_cache_usage_perc is",
            "words": "whole answers are cut off before their end, and say they are whole",
        },
    ),
    (
        "replica",
        "other words, no queue, no deadline",
        {
            "words": "0 of 8 whole answers have the checkpoint's words",
            "queue": "all 80 were accepted",
            "deadline": "it is not kept",
        },
    ),
    (
        "replica",
        "cuts late",
        {
            "streams_64": "streams are cut off before their end, and say they are whole",
            "killed_replica": "fewer than 2 replicas",
        },
    ),
    ("router", "loses requests", {"killed_replica": "of 8 whole answers .* were not answered; the first: HTTP 503"}),
    ("router", "silent death", {"killed_replica": "streams ended without"}),
    ("router", "one works", {"balance": "with different prompts the replicas computed"}),
]


@pytest.mark.parametrize(
    "kind, faults, told",
    mostly_thorough(FAULTS, [0, 2, -1], [2]),
    ids=[faults for _, faults, _ in FAULTS],
)
def test_a_fault_loses_its_criterion_and_is_told(tmp_path, kind, faults, told):
    results = graded(plan(tmp_path, faults, service=kind), *told)
    for name, words in told.items():
        assert not results[name].met and re.search(words, results[name].told), results[name].told
        assert results[name].criterion.limit in acceptance.line(results[name])


@SLOW
def test_one_after_the_other_is_too_slow_and_no_ablation(tmp_path):
    results = graded(plan(tmp_path, promise=6, service="serial", no_batching="serial"), "latency", "batching")
    assert "6 times were promised" in results["latency"].told and not results["latency"].met
    assert not results["batching"].met
    (result,) = graded(plan(tmp_path, promise=40, service="replica"), "latency").values()
    assert "40 times are promised: more than 32" in result.told


@pytest.mark.parametrize(
    "more, told",
    [
        ({"measured": {"latency": 1}}, r"\[measured\] has no batching, replicas"),
        ({"why": "It is fast."}, "why has 11 characters"),
        ({"measured": {**NUMBERS, "latency": 900}}, "latency was measured as 900 by you and as"),
    ],
)
def test_a_report_without_its_numbers(tmp_path, more, told):
    results = graded(plan(tmp_path, service="replica", **more), "latency", "report")
    assert not results["report"].met and re.search(told, results["report"].told)


def test_a_deployment_that_does_not_start_is_told_its_last_words(tmp_path):
    plan(tmp_path)
    text = (tmp_path / "deploy.toml").read_text()
    (tmp_path / "deploy.toml").write_text(text.replace("fake_service {port}", "fake_service {port} no-number"))
    results = graded(tmp_path)
    assert len(results) == 12 and not any(result.met for result in results.values())
    assert all("`service` does not start: its command ended with status 1" in r.told for r in results.values())
    assert "ValueError" in results["words"].told


@pytest.mark.parametrize(
    "old, new, told",
    [
        ("[start]", "[begin]", "begin"),
        ("service = ", "servise = ", "no `service`"),
        ("{deadline}", "60", "does not use {deadline}"),
        ("latency = 30", "latency = true", "[promise] latency is True"),
        ("[start]", "[start", "cannot be read"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path, old, new, told):
    path = plan(tmp_path) / "deploy.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError) as error:
        DEPLOYMENT.read_plan(path)
    assert told in error.value.what and error.value.fix


def test_the_solution_can_be_read():
    solution = (ROOT / "course/capstones/04_service/solution/deploy.toml").read_text()
    assert DEPLOYMENT.read_plan(ROOT / "course/capstones/04_service/solution/deploy.toml").why.strip()
    assert "placeholder" not in solution


def test_the_command_grades_a_folder_of_folders(tmp_path, monkeypatch, capsys):
    def run(folder, options, random, tell):
        for criterion in options.criteria:
            tell(acceptance.Result(criterion, folder.name == "ada", f"{random.random():.3f} \x1b[2J"))

    capstone = acceptance.Capstone(
        "09_toy", "plan.txt", [acceptance.Criterion("a", 3, "la"), acceptance.Criterion("b", 4, "lb")],
        lambda parser: None, run,
    )  # fmt: skip
    monkeypatch.setattr(acceptance, "load", lambda wanted: capstone)
    for name in ("bob", "ada"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.txt").touch()
    from labkit.grade import main

    line = [str(tmp_path), "--capstone", "9", "--out", str(tmp_path / "m.csv"), "--json", str(tmp_path / "m.json")]
    assert main([*line, "--seed", "s"]) == 0
    said = capsys.readouterr().out
    assert "7 of 7 points" in said and "0 of 7 points" in said and "wanted: lb" in said and "\x1b" not in said
    assert (tmp_path / "m.csv").read_text() == "learner,a,b,points,of\nada,3,4,7,7\nbob,0,0,0,7\n"
    kept = json.loads((tmp_path / "m.json").read_text())
    assert kept["seed"] == "s" and [r["met"] for r in kept["learners"]["ada"]] == [True, True]
    assert kept["learners"]["ada"][0]["told"] == kept["learners"]["bob"][0]["told"], "all are asked the same"
    assert main([*line, "--only", "b"]) == 0 and "of 4 points" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no criterion"):
        main([*line, "--only", "c"])
    with pytest.raises(DataError, match=r"there is no plan\.txt"):
        main(
            [str(tmp_path / "ada" / ".."), "--capstone", "9"] if False else [str(tmp_path / "none"), "--capstone", "9"]
        )


def test_a_capstone_that_is_not_there():
    assert acceptance.load("4") is acceptance.load("04") is acceptance.load("04_service")
    with pytest.raises(ConfigError, match="there is no capstone `7`"):
        acceptance.load("7")


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_the_solution_gets_every_point(tmp_path):
    """As docs/capstones.md has the commands."""
    page = (ROOT / "docs" / "capstones.md").read_text()
    script = re.search(r"```bash\n(minimegatron train .*?)```", page, re.S)[1]
    solution = ROOT / "course" / "capstones" / "04_service" / "solution"
    script += f"minimegatron grade {solution} --capstone 04 --checkpoint runs/capstone-04/model"
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, timeout=1700, cwd=tmp_path,
        env={"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and "100 of 100 points" in done.stdout, done.stdout + done.stderr[-2000:]
