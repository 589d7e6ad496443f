"""The judge of an exercise: three kinds of process that exchange plain data.

    conduct    knows the course     draws trials from the seed (`labkit.settings`)    -> inputs
    play       knows the learner    calls the learner's code, once a trial and rank   -> answers and evidence
    conduct    goes on              computes the references, compares                 -> verdict

This module has the order of the steps; `playing` has the second line, `deciding` the first and the third. If only a
trial in a special setting is wrong, its inputs are played once more without the setting, so that the verdict can name
it: by then the process that compared is dead, too, and a new one (`decide`) compares again.

Each is a fresh fork of the nursery. The expected answers are computed when every process of the learner's is dead,
and no comparison is ever evaluated in an interpreter that has run the learner's code: not in theirs, nor in the
notebook's kernel. A patched `torch.allclose`, an `__eq__` that is always true, an exit code of 0, a printed
"passed" have nothing to attack.

It fails closed. No answer, a late answer, half an answer, an answer that cannot be read: no points, and the reason.
"""

from __future__ import annotations

import ast
import dataclasses
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.deciding import NOT_TRIED, conduct, decide
from labkit.exercises import Prepared, load_lab
from labkit.fresh import Nursery, Reply
from labkit.nursery import Limits
from labkit.player import STUB
from labkit.playing import play, vary
from labkit.said import WORDS
from labkit.suspects import known
from labkit.verdict import Verdict
from minimegatron.errors import MinimegatronError

_OWN = Limits(seconds=120.0)  # for the course's own code


class CourseError(MinimegatronError):
    """The course's own code failed: a fault of the lab's author, not of the learner's."""


def judge(
    nursery: Nursery, course: str, exercise: str, sources: Mapping[str, str], seed: int | str | None = None,
    *, brief: bool = False,
) -> Verdict:  # fmt: skip
    """Check one exercise.

    Args:
        nursery: server of processes.
        course: the course module, e.g. `course.01_process_groups`.
        exercise: its name.
        sources: {exercise: text of the cell} of all that the learner has written.
        seed: seed of the hidden cases; by default a new secret one.
        brief: stop at the first failure: only whether it passes is asked.
    Raises:
        ConfigError: the lab has no such exercise.
        CourseError: the course's own code failed.
    """
    asked = load_lab(course)[exercise]
    if exercise not in sources:
        return Verdict(exercise, "todo", asked.points, note=WORDS["first"].format(exercise=exercise))
    job = {"course": course, "exercise": exercise, "seed": secrets.token_hex(16) if seed is None else seed}
    hidden = str(Path(str(sys.modules[course].__file__)).resolve().parent)
    prepared = asked.prepare(nursery, sources[exercise], hidden) if asked.prepare else Prepared()

    def played(drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [prepared.outcome] if prepared.outcome else play(nursery, asked, sources, drawn, hidden, prepared.data)

    outcomes: list[list[dict[str, Any]]] = []

    def play_all(cases: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        for drawn in cases:
            late = bool(outcomes) and ("error" if brief else "late") in outcomes[-1][-1]
            outcomes.append([{"error": NOT_TRIED, "late": True}] if late else played(drawn))
        return outcomes

    decided = _result(nursery.confer(conduct, job, _OWN, play_all, path=sys.path), exercise)
    if (decided["again"] or decided["wrong"]) and not brief:
        more: dict[str, Any] = {"again": {index: played([trial])[0] for index, trial in decided["again"].items()}}
        solved, mistakes = ({}, []) if asked.prepare else known(course, asked.name)  # a kernel's would each be compiled

        def gives(ways: Sequence[int], on: Sequence[dict[str, Any]]) -> list[list[Any] | str | None]:
            """What each of these known mistakes gives on each of these trials; an error that it raises; or None."""
            variants = [mistakes[way].source for way in ways]
            return vary(nursery, asked, solved, variants, on, hidden) if ways and on else []

        def gives_more(question: dict[str, Any]) -> list[list[list[Any] | str | None]]:
            return [gives(question["ways"], on) for on in question["trials"]]

        wrong = decided["wrong"]
        given = gives(range(len(mistakes)), list(wrong.values()))
        more["hints"] = [one.hint for one in mistakes]
        more["known"] = {
            index: [(way, values[at]) for way, values in enumerate(given) if isinstance(values, list)]
            for at, index in enumerate(wrong)
        }
        decided = _result(
            nursery.confer(decide, {**job, "outcomes": outcomes, **more}, _OWN, gives_more, path=sys.path), exercise
        )
    verdict = Verdict.from_plain(decided["verdict"])
    if verdict.state == "todo" and not verdict.note:
        return dataclasses.replace(verdict, note=_left_over(sources[exercise]))
    return verdict


def _left_over(source: str) -> str:
    """A remark, if the stub's own line still stands below an answer."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # CUDA
        return ""
    for block in ast.walk(tree):
        body = [s for s in getattr(block, "body", None) or [] if not _is_text(s)] if hasattr(block, "name") else []
        stub = next((s for s in body if isinstance(s, ast.Raise) and STUB in ast.unparse(s)), None)
        if stub is not None and len(body) > 1:
            return f"line {stub.lineno} is still `{ast.unparse(stub)}`"
    return ""


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _result(reply: Reply, exercise: str) -> Any:
    if reply.ended:
        raise CourseError(f"the course's own process ended without an answer: {reply.ended}", where=exercise)
    if "raised" in reply.value:
        raise CourseError(f"the course's own code failed\n{reply.value['raised']}", where=f"exercise {exercise}")
    return reply.value["result"]
