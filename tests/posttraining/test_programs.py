"""Answers that are programs: what they cannot do, what they are worth, and that none outlasts its deadline."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from minimegatron.errors import ConfigError
from minimegatron.posttraining import limited
from minimegatron.posttraining.environments import Turn, environment
from minimegatron.posttraining.limited import FORBIDDEN, Job, Limits, run, run_all
from minimegatron.posttraining.programs import TASKS, Code, Task, program
from minimegatron.posttraining.rollouts import Episode
from tests.posttraining.test_tasks import ANSWERS, trainer_of

RIGHT = {
    "double": "def double(x): return 2 * x",
    "add": "def add(a, b):\n    return a + b",
    "larger": "larger = max",
    "gcd": "from math import gcd",
    "is_even": "def is_even(n): return n % 2 == 0",
    "backwards": "def backwards(text): return text[::-1]",
    "vowels": "def vowels(text): return sum(letter in 'aeiou' for letter in text)",
    "is_palindrome": "def is_palindrome(text): return text == text[::-1]",
    "total": "total = sum",
    "squares": "def squares(n): return [i * i for i in range(n)]",
    "unique": "def unique(items): return list(dict.fromkeys(items))",
    "factorial": "import math\nfactorial = math.factorial",
    "count": "def count(text, letter): return text.count(letter)",
    "second": "def second(items): return sorted(items)[1]",
    "flatten": "import itertools\ndef flatten(lists): return list(itertools.chain(*lists))",
}
BAD = {
    "hangs": ("while True: pass", "killed by SIGKILL"),
    "sleeps": ("import time\ntime.sleep(10 ** 6)", "took longer than"),
    "sleeps when called": ("import time\ndef double(x): time.sleep(10 ** 6)", "took longer than"),
    "forks": ("import os\nwhile True: os.fork()", "BlockingIOError"),
    "starts programs": ("import subprocess\nsubprocess.run(['sleep', '1000'])", "Error"),
    "starts threads": ("import threading\nthreading.Thread(target=print).start()", "RuntimeError"),
    "fills memory": ("x = [0] * (1 << 40)", "MemoryError"),
    "fills memory slowly": ("x = []\nwhile True: x.append(bytes(1 << 20))", "MemoryError"),
    "leaves": ("import os\nos._exit(0)", "left with exit status 0"),
    "leaves politely": ("raise SystemExit", "SystemExit"),
    "kills itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", ""),
    "is no Python": ("def double(x) return", "SyntaxError"),
    "lacks the function": ("def triple(x): return 3 * x", "KeyError"),
    "raises": ("def double(x): return 1 / 0", "ZeroDivisionError"),
    "says too much": ("def double(x): return 'x' * (1 << 20)", "said more than"),
    "returns what is no JSON": ("def double(x): return {x}", "TypeError"),
    "prints for ever": ("while True: print('x' * 1000)", "killed by SIGKILL"),
    "recurses": ("def double(x): return double(x)", "RecursionError"),
    "knows the visible value": ("def double(x): return 6", "a wrong value for [0]"),
    "returns another type": ("def double(x): return float(2 * x)", "a wrong value for [3]"),
    "claims to be right": (
        "import os\nfor fd in range(3, 32):\n    try: os.write(fd, b'{\"value\": 6}\\n' * 3)\n"
        "    except OSError: pass\nos._exit(0)",
        "a wrong value for [0]",
    ),
}
LONG = Limits(seconds=60.0, cpu_seconds=1)  # of the clock enough for a busy machine


@pytest.fixture(scope="module")
def code() -> Code:
    return Code(limits=LONG)


def test_right_answers_have_the_reward(code: Code) -> None:
    """Of every task that is asked, written plainly and in a block."""
    problems = [*code.problems(False), *code.problems(True)]
    assert len(problems) == len(TASKS) == len(RIGHT) and len(code.problems(True)) == 3
    played = []
    for problem in problems:
        text = next(text for name, text in RIGHT.items() if f"function {name}(" in problem.prompt)
        played += [(problem, [text]), (problem, [f"Sure:\n```python\n{text}\n```\nIt works."])]
    assert [(turn.reward, turn.said) for turn in code.turns(played)] == [(1.0, "")] * len(played)
    assert "double(3) == 6" in code.problems(True)[0].prompt and "-14" not in code.problems(True)[0].prompt
    assert program("```\nx = 1\n```") == "x = 1\n"


@pytest.mark.parametrize("name", BAD)
def test_bad_answers_are_worth_nothing_and_are_told_apart(code: Code, name: str) -> None:
    text, reason = BAD[name]
    asked = Code(limits=Limits(seconds=0.5)) if "sleeps" in name else code
    turn = asked.turn(code.problems(True)[0], [text])
    assert turn.reward == 0.0 and turn.reason and reason in turn.reason


def test_no_process_of_an_answer_is_left(code: Code) -> None:
    """`/proc` names whoever could still run."""

    def children() -> set[int]:
        found = set()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and b"limited_child" in (entry / "cmdline").read_bytes():
                    found.add(int(entry.name))
            except OSError:
                continue
        return found

    before = children()
    jobs = [Job(text, "double", [[3]]) for text, _ in BAD.values()]
    run_all(jobs[:4], Limits(seconds=1.0))
    assert children() <= before


def test_a_deadline_holds_for_a_child_that_cannot_be_asked() -> None:
    """One that is stopped: the time is that of the clock, and the group is killed."""
    popen, started = limited.subprocess.Popen, []

    def stopped(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        os.kill(started[-1].pid, signal.SIGSTOP)
        return started[-1]

    with mock.patch.object(limited.subprocess, "Popen", stopped), mock.patch.object(limited, "GRACE", 0.1):
        outcome = run(Job("", "f", [[1]]), Limits(seconds=0.3))
    assert outcome.reason == "took longer than 0.3 s" and started[0].returncode == -signal.SIGKILL


def test_everything_forbidden_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a promise that is not held is an error that names it."""
    limited.check()
    for name in FORBIDDEN:
        with monkeypatch.context() as patch:
            patch.setitem(FORBIDDEN, name, "pass")
            with pytest.raises(ConfigError, match=f"would not be kept from {name}\n") as caught:
                limited.check()
        assert "Landlock" in caught.value.fix


def test_what_cannot_be_limited_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that refuses one of the parts: the answer is not executed."""
    child = tmp_path / "child.py"
    child.write_text(limited.CHILD.read_text().replace('call("unshare"', 'call("setns"'))
    monkeypatch.setattr(limited, "CHILD", child)
    assert run(Job("def f(x): return x", "f", [[1]])).reason.startswith("not limited: [Errno")
    with pytest.raises(ConfigError, match="programs cannot be limited on this machine"):
        environment("code")


def own_tasks() -> Code:
    """An environment of one's own."""
    return Code([Task("f(x)", "x", [([1], 1)], [([2], 2)])] * 5, LONG)


def test_a_model_is_trained_by_programs_that_fail(capsys: pytest.CaptureFixture) -> None:
    line = ANSWERS.replace("--environment format", "--environment tests.posttraining.test_programs:own_tasks")
    line = line.replace("--train-iters 3", "--train-iters 2")
    trainer = trainer_of("grpo", f"{line} --micro-batch-size 4 --seq-length 128 --eval-interval 2 --eval-iters 1")
    trainer.metrics.speaks = True
    said: list[str] = []
    trainer.task.observer.say = said.append
    trainer.train()
    trainer.close()
    assert any(text.startswith("rewards of 0: ") and "Error" in text for text in said)


def judged(rank: int, world: int, line: str) -> list[Turn]:
    trainer = trainer_of("grpo", line, world)
    sampler = trainer.task.observer.sampler
    episode = Episode(sampler.environment.problems(False)[0], [1], [True], [0.0], ["noon"])
    try:
        return sampler._judged([(0, i, episode) for i in range(20)])
    finally:
        trainer.close()


def test_ranks_take_what_one_has_judged(ranks: Any) -> None:
    line = ANSWERS.replace("--environment format", "--environment tests.posttraining.environments:Clock")
    line += " --micro-batch-size 4 --tensor-model-parallel-size 2 --rl-inference-tensor-model-parallel-size 2"
    first, second = ranks(2).run(judged, line)
    assert first == second and len({turn.reward for turn in first}) > 1
