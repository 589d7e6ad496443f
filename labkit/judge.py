"""The judge of an exercise: three kinds of process, and plain data between them.

    draw       knows the course     draws trials from the seed (`labkit.settings`)    -> inputs
    play       knows the learner    calls the learner's code, once a trial and rank   -> answers and evidence
    decide     knows the course     draws again, computes the references, compares    -> verdict

The trials of a case without ranks share one process; on ranks each has its own. Where only a trial in a setting of its
own is wrong, its inputs are played once more without it, so that the verdict can name the setting.

Each is a fresh fork of the nursery. The expected answers come into being in `decide`, when every process of the
learner's is dead, and no comparison is ever evaluated in an interpreter that has run the learner's code: not in theirs,
nor in the notebook's kernel. A patched `torch.allclose`, an `__eq__` that is always true, an exit code of 0, a printed
"passed" have nothing to attack.

It fails closed. No answer, a late answer, half an answer, an answer that cannot be read: no points, and the reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from labkit import cuda, player, transport
from labkit.beside import run as beside_run
from labkit.compare import difference
from labkit.evidence import Evidence
from labkit.exercises import Answer, Case, Exercise, Mistake, load_lab
from labkit.fresh import Nursery, Reply
from labkit.nursery import Failed, Limits
from labkit.settings import PLAIN, Trial, place, trials
from labkit.transport_log import Entry
from labkit.verdict import Row, Verdict
from minimegatron.errors import MinimegatronError, ranges
from minimegatron.kernels.build import KernelsUnavailable

Plain = dict[str, Any] | None
_OWN = Limits(seconds=120.0)  # for the course's own code
_SENT = {"answers": "value", "evidence": "evidence", "changed": "changed"}  # by rank, and in what a rank sends
_NAME, _OP = ([field.name for field in dataclasses.fields(Entry)].index(name) for name in ("name", "op"))
_NOT_TRIED = "not tried after that"
_CAUSES = {"SIGFPE": "an integer was divided by 0", "SIGSEGV": "functions that call themselves too often?"}
_WRONG = "wrong; the inputs and answers of this case stay hidden"
Apart = tuple[str, str]  # how an answer departs from what was expected, and that where the case is hidden


class CourseError(MinimegatronError):
    """The course's own code failed: a fault of the lab's author, not of the learner's."""


def judge(
    nursery: Nursery, course: str, exercise: str, sources: Mapping[str, str], seed: int | str | None = None,
    *, brief: bool = False,
) -> Verdict:  # fmt: skip
    """Check one exercise.

    Args:
        nursery: where processes come from.
        course: the course module, e.g. `course.01_process_groups`.
        exercise: its name.
        sources: {exercise: text of the cell} of all that the learner has written.
        seed: of the hidden cases; by default a new secret one.
        brief: only whether it passes is asked: nothing more is tried after a failure.
    Raises:
        ConfigError: the lab has no such exercise.
        CourseError: the course's own code failed.
    """
    asked = load_lab(course)[exercise]
    if exercise not in sources:
        return Verdict(exercise, "todo", asked.points, note=f"run its cell, %%exercise {exercise}, first")
    job = {"course": course, "exercise": exercise, "seed": secrets.token_hex(16) if seed is None else seed}
    hidden = str(Path(str(sys.modules[course].__file__)).resolve().parent)
    libraries, refused = _compiled(nursery, exercise, sources[exercise], hidden) if asked.kernels else (None, None)

    def play(drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [refused] if refused else _play(nursery, asked, sources, drawn, hidden, libraries)

    outcomes: list[list[dict[str, Any]]] = []
    for drawn in _own(nursery, draw, job):
        late = bool(outcomes) and ("error" if brief else "late") in outcomes[-1][-1]
        outcomes.append([{"error": _NOT_TRIED, "late": True}] if late else play(drawn))
    decided = _own(nursery, decide, {**job, "outcomes": outcomes})
    if decided["again"] and not brief:
        again = {index: play([trial])[0] for index, trial in decided["again"].items()}
        decided = _own(nursery, decide, {**job, "outcomes": outcomes, "again": again})
    return Verdict.from_plain(decided["verdict"])


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
    nursery: Nursery, asked: Exercise, sources: Mapping[str, str], drawn: list[dict[str, Any]], hidden: str,
    libraries: Plain,
) -> list[dict[str, Any]]:  # fmt: skip
    """An outcome for each trial of a case, up to the first that fails."""
    common: dict[str, Any] = {
        "sources": dict(sources), "exercise": asked.name, "function": asked.function or asked.name,
        "drive": asked.drive_source, "seconds": asked.seconds, "hidden": hidden, "spoil": list(asked.spoil),
        "services": [], "without": list(asked.without),
    }  # fmt: skip
    limits = Limits(seconds=asked.seconds)
    if not drawn[0]["world"]:
        services = ["kernels"] * (libraries is not None) + ["memory"] * bool(asked.memory)
        given = [{k: v for k, v in trial["inputs"].items() if k not in asked.memory} for trial in drawn]
        job = {**common, "world": 0, "strided": [False] * len(drawn), "trials": given, "services": services}
        if not services:
            return _outcomes(nursery.call(player.play, [job], limits), [], len(drawn), asked, sources)
        stays = [{name: trial["inputs"][name] for name in asked.memory} for trial in drawn]
        beside = {"libraries": libraries, "memory": stays if asked.memory else None, "hidden": hidden,
                  "seconds": asked.seconds}  # fmt: skip
        reply, judged = nursery.call(player.play, [job], limits, beside=(beside_run, beside))
        played = _outcomes([reply], [], len(drawn), asked, sources)
        if judged.ended or not isinstance(judged.value, dict):
            cause = next((f" ({why})" for signal, why in _CAUSES.items() if signal in judged.ended), "")
            return [*played[:-1], {"error": f"the kernel ended the process that ran it: it {judged.ended}{cause}"}]
        if len(judged.value.get("kernels", [])) > len(drawn):
            return [*played[:-1], {"error": "it begins trials of its own"}]
        _witnessed(played, judged.value)
        return played
    outcomes: list[dict[str, Any]] = []
    for _, alike in itertools.groupby(drawn, key=lambda trial: (trial["world"], trial["members"], trial["groups"])):
        if not outcomes or "answers" in outcomes[-1]:
            outcomes += _play_on_ranks(nursery, asked, sources, list(alike), common)
    return outcomes


def _play_on_ranks(
    nursery: Nursery, asked: Exercise, sources: Mapping[str, str], drawn: list[dict[str, Any]], common: dict[str, Any]
) -> list[dict[str, Any]]:
    """Outcomes of trials on the same ranks, one after the other in the same processes, up to the first that fails."""
    world, members = drawn[0]["world"], drawn[0]["members"]
    place = {key: drawn[0][key] for key in ("world", "members", "groups")}
    jobs = [{**common, **place, "strided": [], "trials": []} for _ in range(world)]
    late: dict[int, list[Any]] = {rank: [] for rank in members}
    for trial in drawn:
        for rank, inputs in zip(members, trial["inputs"], strict=True):  # each rank sees its own alone
            jobs[rank]["trials"].append({name: value for name, value in inputs.items() if name != asked.late})
            jobs[rank]["strided"].append(trial["strided"])
            late[rank].append(inputs.get(asked.late, ()))
    *replies, heard = nursery.call(player.play, jobs, Limits(seconds=asked.seconds), beside=(transport.listen, late))
    outcomes = _outcomes(replies, members, len(drawn), asked, sources)
    return [_with_log(one, heard, members, index, index == len(drawn) - 1) for index, one in enumerate(outcomes)]


def _with_log(outcome: dict[str, Any], heard: Reply, members: list[int], index: int, last: bool) -> dict[str, Any]:
    """An outcome on ranks with what the broker has heard: `log`, of each member; or the reason why it is wrong."""
    if "answers" not in outcome:
        return outcome
    if heard.ended:
        return {"error": f"no answer: the judge's broker {heard.ended}"}
    if last and heard.value["out_of_step"]:
        return {"error": heard.value["out_of_step"]}
    logs = [_of_the_call(heard.value["entries"][rank], index, last) for rank in members]
    return {**outcome, "log": logs, "members": members}


def _of_the_call(entries: list[list[Any]], index: int, last: bool) -> list[list[Any]]:
    """What a rank did between the player's marks of this trial and the next; in the last, all that follows.

    A learner's code can set such a mark too: then what it does before the player's own counts in the next trial.
    """
    marks = {one[_OP]: at for at, one in reversed([*enumerate(entries)]) if one[_NAME] == "mark"}  # the first of each
    end = None if last else marks.get(player.begins(index + 1))
    return entries[marks.get(player.begins(index), -1) + 1 : end]


def _witnessed(outcomes: list[dict[str, Any]], said: dict[str, Any]) -> None:
    """Put what the judge's own process saw in the place of what a learner's says about itself."""
    launches, moved = said.get("kernels", []), said.get("memory", [])
    for index, outcome in enumerate(outcomes):
        for one in outcome.get("evidence", []):
            if isinstance(one, dict):
                one["launches"] = launches[index] if index < len(launches) else []
                one["memory"] = moved[index] if index < len(moved) else None


def _outcomes(
    replies: list[Reply], members: list[int], trials: int, asked: Exercise, sources: Mapping[str, str]
) -> list[dict[str, Any]]:
    """`{"answers", "evidence", "changed"}`, lists by rank, of each trial; at the end perhaps a `_failure`."""
    beside = [reply for rank, reply in enumerate(replies) if members and rank not in members]
    mine = [replies[rank] for rank in members] if members else replies
    failed = _failure(mine, asked, sources) or (_failure(beside, asked, sources) if beside else None)
    done = [_trials_of(reply) for reply in mine]
    if failed is None and any(len(of_rank) != trials for of_rank in done):
        failed = {"error": "no answer: the process sent what cannot be read"}
    together = [
        {key: [one.get(name) for one in ranks] for key, name in _SENT.items()} for ranks in zip(*done, strict=False)
    ]
    for outcome in together:
        _witnessed([outcome], {})
    return [*together[: trials - 1], failed] if failed else together


def _trials_of(reply: Reply) -> list[dict[str, Any]]:
    """The trials that one rank has sent, as far as they can be read."""
    found = reply.value.get("trials") if isinstance(reply.value, dict) else None
    return [one if isinstance(one, dict) else {} for one in found] if isinstance(found, list) else []


def _failure(replies: list[Reply], asked: Exercise, sources: Mapping[str, str]) -> dict[str, Any] | None:
    """One of `{"todo"}`, `{"error"}` from what the ranks sent; None when all have sent trials."""
    said = [_readable(reply.value) for reply in replies]
    if todo := next((one["todo"] for one in said if "todo" in one), None):
        return {"todo": str(todo)}
    errors = [(bool(said[r].get("peer")), replies[r].order, r) for r in range(len(said)) if "error" in said[r]]
    source = sources[asked.name]
    if errors:
        rank = min(errors)[2]
        same = [r for r, one in enumerate(said) if one.get("error") == said[rank]["error"]]
        text = f"{_who(same, len(said))}{said[rank]['error']}{_at([said[r].get('line') for r in same], same, source)}"
        return {"error": text}
    if any(reply.ended == "late" for reply in replies):
        where = _waiting(replies, asked.name, source)
        return {"error": f"no answer within {asked.seconds:g} s{where}", "late": True}
    for rank, (reply, one) in enumerate(zip(replies, said, strict=True)):
        if reply.ended or "trials" not in one:
            why = reply.ended or "sent what cannot be read"
            return {"error": f"{_who([rank], len(said))}no answer: the process {why}"}
    return None


def _readable(value: Any) -> dict[str, Any]:
    """What a process has sent, if its reasons are those that the player gives; else nothing."""
    if not isinstance(value, dict):
        return {}
    fits = all(
        isinstance(value.get(key, kind()), kind) for key, kind in (("todo", str), ("error", str), ("peer", bool))
    )
    return value if fits else {}


def _who(ranks: list[int], world: int) -> str:
    if world == 1:
        return ""
    if len(ranks) == world:
        return "every rank: "
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}: "


def _at(numbers: list[Any], ranks: list[int], source: str) -> str:
    """The lines in which an error was raised, where they are known; one for all ranks, or of each."""
    lines = [_line(source, number) for number in numbers]
    if len(set(lines)) > 1:
        return f" ({'; '.join(f'rank {rank}: {line}' for rank, line in zip(ranks, lines, strict=True) if line)})"
    return f" ({lines[0]})" if lines[0] else ""


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
    """The trials of every case."""
    return _guarded(lambda asked: [[trial.to_plain() for trial in case] for case in trials(asked, job["seed"])], job)


def decide(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """The verdict, from what was sent by the learner's processes, and {case: trial} to be played once more, plain."""
    return _guarded(lambda asked: _decide(asked, job), job)


def _guarded(work: Callable[[Exercise], Any], job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": work(load_lab(job["course"])[job["exercise"]])}
    except BaseException:
        raise Failed({"raised": traceback.format_exc(limit=-3)}) from None


def _decide(asked: Exercise, job: dict[str, Any]) -> dict[str, Any]:
    outcomes = job["outcomes"]
    todo = [tried[-1]["todo"] for tried in outcomes if "todo" in tried[-1]]
    if len(todo) == len(outcomes):
        other = [name for name in todo if name != asked.name]
        note = f"it waits for exercise {other[0]}" if other else ""
        return {"verdict": Verdict(asked.name, "todo", asked.points, note=note).to_plain(), "again": {}}
    rows, mistake, again = [], "", dict[int, Trial]()
    only_settings = True  # as far as it is seen, nothing is wrong where nothing is special
    answered = False  # with something wrong: beside an error an idea says nothing
    for index, (case, drawn, tried) in enumerate(zip(asked.cases, trials(asked, job["seed"]), outcomes, strict=True)):
        wrong, said, trial = _first_wrong(asked, case, drawn, tried)
        if wrong and trial and trial.setting != PLAIN:
            again[index] = place(asked, trial.given, PLAIN, "")
            plain = job.get("again", {}).get(index)
            if plain and _wrong(asked, case, again[index], plain)[0] is None:
                wrong = f"{trial.setting.said}: {wrong}"
        elif wrong and trial:
            only_settings = False
        rows.append(Row(case.what, 0 if wrong else case.points, case.points, wrong or ""))
        mistake = mistake or said or ""
        answered = answered or bool(wrong) and said is not None
    passed = all(not row.note for row in rows)
    notes = {row.note for row in rows}
    everywhere = rows[0].note if len(notes) == 1 and "error" in outcomes[0][-1] else ""
    if passed:
        verdict = Verdict(asked.name, "passed", asked.points, tuple(rows))
    else:
        idea = asked.idea if answered else ""
        verdict = Verdict(asked.name, "wrong", asked.points, tuple(rows), everywhere, mistake, idea, asked.hint)
    asks = only_settings and "again" not in job
    return {
        "verdict": verdict.to_plain(),
        "again": {index: trial.to_plain() for index, trial in again.items()} if asks else {},
    }


def _first_wrong(
    asked: Exercise, case: Case, drawn: list[Trial], tried: list[dict[str, Any]]
) -> tuple[str | None, str | None, Trial | None]:
    """(what is wrong in the first trial that is, what `_wrong` says beside it, that trial or None: not tried)."""
    for trial, outcome in zip(drawn, tried, strict=False):
        wrong, said = _wrong(asked, case, trial, outcome)
        if wrong:
            return wrong, said, None if outcome.get("error") == _NOT_TRIED else trial
    if len(tried) < len(drawn):
        return "what it sent cannot be read", None, None
    return None, None, None


def _wrong(asked: Exercise, case: Case, trial: Trial, outcome: dict[str, Any]) -> tuple[str | None, str | None]:
    """(what is wrong or None; the mistake, "" where it is not known, None where there is no answer)."""
    if "todo" in outcome:
        return "not done yet", None
    if "error" in outcome:
        return outcome["error"], None
    on_ranks = isinstance(trial.given, list)
    try:
        value = outcome["answers"] if on_ranks else outcome["answers"][0]
        evidence = [Evidence.from_plain(one) for one in outcome["evidence"]]
        if on_ranks:
            evidence = [e.with_log(log, outcome["members"]) for e, log in zip(evidence, outcome["log"], strict=True)]
        changed = {str(name) for of_rank in outcome["changed"] for name in of_rank}.difference(
            asked.changes, asked.spoil
        )
    except Exception:  # whatever a hostile process writes in the place of its evidence
        return "what it sent cannot be read", None

    def apart(function: Any) -> Apart | None:
        inputs = trial.inputs  # anew each time: the code that gets them may change them
        want = function(inputs) if isinstance(inputs, list) else function(**inputs)
        pairs = zip(value, want, strict=True) if on_ranks else [(value, want)]
        for rank, (one, other) in enumerate(pairs):
            try:
                phrase = difference(one, other, asked.rtol, asked.atol)
            except Exception as error:  # a fault of ours, which must not read as one of the course's
                phrase = f"the answer cannot be compared ({type(error).__name__})"
            if phrase:
                who, part = f"rank {rank}: " if on_ranks else "", _part(phrase, other)
                return f"{who}{phrase}", f"{who}{part} is {_WRONG}" if part else _WRONG
        return None

    def made(mistake: Mistake) -> bool:
        try:
            return apart(mistake.answer) is None
        except RuntimeError:
            if trial.setting.double:  # a mistake need not compute in float64
                return False
            raise

    reference = case.reference or asked.reference
    phrase = apart(reference) if reference else None
    known = next((mistake.hint for mistake in asked.mistakes if made(mistake)), "") if phrase else ""
    if changed:
        return f"it changes its input `{min(changed)}`: compute on a copy", known
    if phrase:
        return phrase[case.hidden], known
    for accept in (*asked.accept, *case.accept):
        try:
            sentence = accept(Answer(value, trial.inputs, evidence))
        except Exception as error:  # an answer of a form that the judge did not expect is a wrong answer
            sentence = f"the answer has not the form that was asked for ({type(error).__name__})"
        if sentence:
            return sentence, ""
    return None, None


def _part(phrase: str, want: Any) -> str:
    """The entry of a dict that a phrase is about, or ""."""
    keys = [str(key) for key in want] if isinstance(want, dict) else []
    return next((key for key in keys if phrase.startswith(f"{key}: ")), "")
