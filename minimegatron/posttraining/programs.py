"""The environment `code`: "write the function", judged by running the answer under limits (`limited`).

    prompt    what the function does, and visible tests       Write a Python function gcd(a, b): ... gcd(12, 18) == 6
    answer    a program: all of it, or its first fenced block
    reward    1 if visible and hidden tests give the right values, else 0, with the reason

Hidden tests keep an answer from repeating the visible values. A task is data, so an own environment is a function that
returns `Code(tasks)`, and `--environment module:function` names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from minimegatron.posttraining import limited
from minimegatron.posttraining.environments import Problem, Turn


class Task(NamedTuple):
    """A function to be written.

    Attributes:
        call: its name and arguments, e.g. `gcd(a, b)`.
        says: what it returns.
        visible, hidden: (arguments, value) of each test, plain values.
    """

    call: str
    says: str
    visible: Sequence[tuple[Sequence[Any], Any]]
    hidden: Sequence[tuple[Sequence[Any], Any]]

    def problem(self) -> Problem:
        """The task as it is asked; what the verifier compares with is JSON."""
        name = self.call.partition("(")[0]
        shown = "".join(f"{name}({', '.join(map(repr, args))}) == {value!r}\n" for args, value in self.visible)
        prompt = f"Write a Python function {self.call}: {self.says}.\n{shown}"
        return Problem(prompt, json.dumps({"name": name, "tests": [*self.visible, *self.hidden]}))


TASKS = (
    Task("double(x)", "twice x", [([3], 6)], [([0], 0), ([-7], -14)]),
    Task("add(a, b)", "the sum", [([2, 3], 5)], [([0, 0], 0), ([-4, 9], 5)]),
    Task("larger(a, b)", "the larger number", [([2, 3], 3)], [([5, -1], 5), ([4, 4], 4)]),
    Task("gcd(a, b)", "the greatest common divisor", [([12, 18], 6)], [([7, 3], 1), ([20, 5], 5)]),
    Task("is_even(n)", "whether n is even", [([4], True)], [([7], False), ([0], True)]),
    Task("backwards(text)", "the text from its end", [(["abc"], "cba")], [([""], ""), (["xyzw"], "wzyx")]),
    Task("vowels(text)", "how many of aeiou it has", [(["banana"], 3)], [(["xyz"], 0), (["audio"], 4)]),
    Task("is_palindrome(text)", "whether it reads alike from both ends", [(["abba"], True)],
         [(["abc"], False), (["x"], True)]),
    Task("total(items)", "the sum of a list of numbers", [([[1, 2, 3]], 6)], [([[]], 0), ([[-5, 5, 4]], 4)]),
    Task("squares(n)", "the squares of 0 to n - 1, in a list", [([3], [0, 1, 4])],
         [([0], []), ([5], [0, 1, 4, 9, 16])]),
    Task("unique(items)", "the list without repetitions, in order", [([[1, 2, 1]], [1, 2])],
         [([[]], []), ([[3, 3, 2, 3]], [3, 2])]),
    Task("factorial(n)", "1 * 2 * ... * n", [([4], 24)], [([0], 1), ([6], 720)]),
    Task("count(text, letter)", "how often the letter is in the text", [(["hello", "l"], 2)],
         [(["", "a"], 0), (["aaa", "a"], 3)]),
    Task("second(items)", "the second smallest number of a list", [([[3, 1, 2]], 2)],
         [([[5, 4]], 5), ([[9, 0, 9, 4]], 4)]),
    Task("flatten(lists)", "the items of all lists, in one", [([[[1], [2, 3]]], [1, 2, 3])],
         [([[]], []), ([[[], [4]]], [4])]),
)  # fmt: skip
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class Code:
    """Functions to be written; every fifth is held out.

    Args:
        tasks: what to ask.
        limits: what an answer may use.

    Raises:
        ConfigError: the machine cannot limit programs.
    """

    def __init__(self, tasks: Sequence[Task] = TASKS, limits: limited.Limits = limited.LIMITS) -> None:
        limited.check()
        self.tasks, self.limits = tuple(tasks), limits

    def problems(self, held_out: bool) -> Sequence[Problem]:
        return [task.problem() for i, task in enumerate(self.tasks) if (i % 5 == 0) == held_out]

    def turn(self, problem: Problem, answers: Sequence[str]) -> Turn:
        return self.turns([(problem, answers)])[0]

    def turns(self, played: Sequence[tuple[Problem, Sequence[str]]]) -> list[Turn]:
        """`turn` of many, as many at once as there are cores."""
        tests = [json.loads(problem.answer) for problem, _ in played]
        jobs = [
            limited.Job(program(answers[-1]), each["name"], [arguments for arguments, _ in each["tests"]])
            for each, (_, answers) in zip(tests, played, strict=True)
        ]
        found = limited.run_all(jobs, self.limits)
        return [_judged(outcome, each["tests"]) for outcome, each in zip(found, tests, strict=True)]


def program(answer: str) -> str:
    """The program of an answer: its first fenced block, or all of it."""
    block = _BLOCK.search(answer)
    return answer if block is None else block.group(1)


def _judged(outcome: limited.Outcome, tests: Sequence[tuple[Sequence[Any], Any]]) -> Turn:
    for (arguments, right), value in zip(tests, outcome.values, strict=False):
        if json.dumps(value) != json.dumps(right):  # 1 is not True
            return Turn(0.0, reason=f"a wrong value for {json.dumps(arguments)[:60]}")
    return Turn(0.0, reason=outcome.reason) if outcome.reason else Turn(1.0)
