"""The judge of an exercise: three kinds of process, and plain data between them.

    draw       knows the course     draws inputs from the seed                        -> inputs
    play       knows the learner    calls the learner's code, once a case and rank    -> answers and evidence
    decide     knows the course     draws again, computes the references, compares    -> verdict

Each is a fresh fork of the nursery. The expected answers come into being in `decide`, when every process of the
learner's is dead, and no comparison is ever evaluated in an interpreter that has run the learner's code: not in theirs,
nor in the notebook's kernel. A patched `torch.allclose`, an `__eq__` that is always true, an exit code of 0, a printed
"passed" have nothing to attack.

It fails closed. No answer, a late answer, half an answer, an answer that cannot be read: no points, and the reason.
"""

from __future__ import annotations

import secrets
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from labkit import cuda, player
from labkit.compare import difference
from labkit.evidence import Evidence
from labkit.exercises import Answer, Case, Exercise, load_lab
from labkit.fresh import Nursery, Reply
from labkit.nursery import Failed, Limits
from labkit.verdict import Row, Verdict
from minimegatron.errors import MinimegatronError, ranges
from minimegatron.kernels.build import KernelsUnavailable

Plain = dict[str, Any] | None
_OWN = Limits(seconds=120.0)  # for the course's own code
_WRONG = "wrong; the inputs and answers of this case stay hidden"


class CourseError(MinimegatronError):
    """The course's own code failed: a fault of the lab's author, not of the learner's."""


def judge(
    nursery: Nursery, course: str, exercise: str, sources: Mapping[str, str], seed: int | str | None = None
) -> Verdict:
    """Check one exercise.

    Args:
        nursery: where processes come from.
        course: the course module, e.g. `course.01_process_groups`.
        exercise: its name.
        sources: {exercise: text of the cell} of all that the learner has written.
        seed: of the hidden cases; by default a new secret one.
    Raises:
        ConfigError: the lab has no such exercise.
        CourseError: the course's own code failed.
    """
    asked = load_lab(course)[exercise]
    if exercise not in sources:
        return Verdict(exercise, "todo", asked.points, note=f"run its cell, %%exercise {exercise}, first")
    job = {"course": course, "exercise": exercise, "seed": secrets.token_hex(16) if seed is None else seed}
    hidden = str(Path(str(sys.modules[course].__file__)).resolve().parent)
    outcomes: list[dict[str, Any]] = []
    libraries, refused = _compiled(nursery, exercise, sources[exercise], hidden) if asked.kernels else (None, None)
    for inputs in _own(nursery, draw, job):
        if refused:
            outcomes.append(refused)
        elif outcomes and "late" in outcomes[-1]:
            outcomes.append({"error": "not tried after that", "late": True})
        else:
            replies = _play(nursery, asked, sources, inputs, hidden, libraries)
            outcomes.append(_outcome(replies, exercise, sources, asked.seconds))
    return Verdict.from_plain(_own(nursery, decide, {**job, "outcomes": outcomes}))


def _own(nursery: Nursery, function: Any, job: dict[str, Any]) -> Any:
    [reply] = nursery.call(function, [job], _OWN, path=sys.path)
    if reply.ended:
        raise CourseError(f"{function.__name__} ended without an answer: {reply.ended}", where=job["exercise"])
    if "raised" in reply.value:
        raise CourseError(f"the course's own code failed\n{reply.value['raised']}", where=f"exercise {job['exercise']}")
    return reply.value["result"]


def _compiled(nursery: Nursery, asked: str, cell: str, hidden: str) -> tuple[Plain, Plain]:
    """The libraries of a cell's kernels, or the outcome of every case where they cannot be made.

    Raises:
        KernelsUnavailable: the machine cannot compile, which is no wrong answer.
    """
    if cuda.todo(cell):  # asked here too: a lab that has not been begun needs no compiler
        return {}, {"todo": asked}
    job = {"cell": cell, "header": str(cuda.header()), "hidden": hidden}
    [reply] = nursery.call(cuda.compile_cell, [job], Limits(seconds=cuda.COMPILE_SECONDS))
    said = reply.value if isinstance(reply.value, dict) else {}
    if "libraries" in said:
        return said["libraries"], None
    if "todo" in said:
        return {}, {"todo": asked}
    if "unavailable" in said:
        raise KernelsUnavailable(said["unavailable"], where="kernels", fix="install g++")
    if "error" in said:
        line = _line(cell, said.get("line"))
        return {}, {"error": f"{said['error']}{f' ({line})' if line else ''}"}
    why = f"it was not done after {cuda.COMPILE_SECONDS:g} s" if reply.ended == "late" else reply.ended
    return {}, {"error": f"the compiler gave no answer: {why or 'it sent what cannot be read'}"}


def _play(
    nursery: Nursery, asked: Exercise, sources: Mapping[str, str], inputs: Any, hidden: str, libraries: Plain
) -> list[Reply]:
    on_ranks = isinstance(inputs, list)
    common = {
        "sources": dict(sources), "exercise": asked.name, "function": asked.function or asked.name,
        "drive": asked.drive_source, "seconds": asked.seconds, "ranks": len(inputs) if on_ranks else 0,
        "hidden": hidden, "libraries": libraries,
    }  # fmt: skip
    jobs = [{**common, "inputs": mine} for mine in (inputs if on_ranks else [inputs])]
    return nursery.call(player.play, jobs, Limits(seconds=asked.seconds))


def _outcome(replies: list[Reply], exercise: str, sources: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """One of `{"answers", "evidence"}` (lists by rank), `{"todo"}`, `{"error"}` from what the ranks sent."""
    said = [reply.value if isinstance(reply.value, dict) else {} for reply in replies]
    if todo := next((one["todo"] for one in said if "todo" in one), None):
        return {"todo": str(todo)}
    errors = [(bool(said[r].get("peer")), replies[r].order, r) for r in range(len(said)) if "error" in said[r]]
    if errors:
        rank = min(errors)[2]
        same = [r for r, one in enumerate(said) if one.get("error") == said[rank]["error"]]
        line = _line(sources[exercise], said[rank].get("line"))
        return {"error": f"{_who(same, len(said))}{said[rank]['error']}{f' ({line})' if line else ''}"}
    if any(reply.ended == "late" for reply in replies):
        where = _waiting(replies, exercise, sources[exercise])
        return {"error": f"no answer within {seconds:g} s{where}", "late": True}
    for rank, (reply, one) in enumerate(zip(replies, said, strict=True)):
        if reply.ended or not {"value", "evidence"} <= one.keys():
            why = reply.ended or "sent what cannot be read"
            return {"error": f"{_who([rank], len(said))}no answer: the process {why}"}
    return {"answers": [one["value"] for one in said], "evidence": [one["evidence"] for one in said]}


def _who(ranks: list[int], world: int) -> str:
    if world == 1:
        return ""
    if len(ranks) == world:
        return "every rank: "
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}: "


def _line(source: str, number: Any) -> str:
    lines = source.splitlines()
    known = isinstance(number, int) and 1 <= number <= len(lines)
    return f"line {number}: {lines[number - 1].strip()}" if known else ""


def _waiting(replies: list[Reply], exercise: str, source: str) -> str:
    """Where each rank was, in the learner's own lines."""
    places: dict[str, list[int]] = {}
    for rank, reply in enumerate(replies):
        here = (f.line for f in reply.stack if PurePath(f.file).parts[-2:] == ("exercises", f"{exercise}.py"))
        line = next(here, None)
        places.setdefault(_line(source, line) or "outside of this cell", []).append(rank)
    return "".join(f"; {_who(ranks, len(replies)) or 'stuck at '}{place}" for place, ranks in places.items())


# Everything below runs in a fresh process of its own.


def draw(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """The inputs of every case."""
    return _guarded(lambda asked: [case.draw(_seed(job, i)) for i, case in enumerate(asked.cases)], job)


def decide(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """The verdict, from what was sent by the learner's processes."""
    return _guarded(lambda asked: _decide(asked, job).to_plain(), job)


def _guarded(work: Callable[[Exercise], Any], job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": work(load_lab(job["course"])[job["exercise"]])}
    except BaseException:
        raise Failed({"raised": traceback.format_exc(limit=-3)}) from None


def _seed(job: dict[str, Any], index: int) -> str:
    return f"{job['seed']}/{job['exercise']}/{index}"


def _decide(asked: Exercise, job: dict[str, Any]) -> Verdict:
    outcomes = job["outcomes"]
    todo = [outcome["todo"] for outcome in outcomes if "todo" in outcome]
    if len(todo) == len(outcomes):
        other = [name for name in todo if name != asked.name]
        return Verdict(asked.name, "todo", asked.points, note=f"it waits for exercise {other[0]}" if other else "")
    rows, hint = [], ""
    for index, (case, outcome) in enumerate(zip(asked.cases, outcomes, strict=True)):
        wrong, said = _wrong(asked, case, outcome, _seed(job, index))
        rows.append(Row(case.what, 0 if wrong else case.points, case.points, wrong or ""))
        hint = hint or said
    passed = all(not row.note for row in rows)
    notes = {row.note for row in rows}
    everywhere = rows[0].note if len(notes) == 1 and "error" in outcomes[0] else ""
    state = "passed" if passed else "wrong"
    return Verdict(asked.name, state, asked.points, tuple(rows), everywhere, "" if passed else hint)


def _wrong(asked: Exercise, case: Case, outcome: dict[str, Any], seed: str) -> tuple[str | None, str]:
    """(what is wrong or None, hint)."""
    if "todo" in outcome:
        return "not done yet", ""
    if "error" in outcome:
        return outcome["error"], ""  # it says more than a hint could
    on_ranks = isinstance(case.draw(seed), list)
    try:
        value = outcome["answers"] if on_ranks else outcome["answers"][0]
        evidence = [Evidence.from_plain(one) for one in outcome["evidence"]]
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError):
        return "what it sent cannot be read", ""

    def apart(function: Any) -> str | None:
        inputs = case.draw(seed)  # anew each time: the code that gets them may change them
        want = function(inputs) if isinstance(inputs, list) else function(**inputs)
        pairs = zip(value, want, strict=True) if on_ranks else [(value, want)]
        for rank, (one, other) in enumerate(pairs):
            if phrase := difference(one, other, asked.rtol, asked.atol):
                return f"rank {rank}: {phrase}" if on_ranks else phrase
        return None

    reference = case.reference or asked.reference
    if reference and (phrase := apart(reference)):
        known = next((mistake.hint for mistake in asked.mistakes if apart(mistake.answer) is None), asked.hint)
        return _WRONG if case.hidden else phrase, known
    for accept in (*asked.accept, *case.accept):
        try:
            sentence = accept(Answer(value, case.draw(seed), evidence))
        except Exception as error:  # an answer of a form that the judge did not expect is a wrong answer
            sentence = f"the answer has not the form that was asked for ({type(error).__name__})"
        if sentence:
            return sentence, asked.hint
    return None, ""
