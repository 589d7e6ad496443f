"""Draw and decide: the course's own code, in processes of its own, before and after the learner's.

    conduct   exercise, seed             -> asks with the trials of every case, plain; gets an outcome a trial
                                         -> the verdict, and the trials to be played once more, plain
    decide    exercise, seed, outcomes   -> the same verdict where some trials have been played once more

Both compare with references when the trials have been played; `decide` draws again. The first trial of a case
that is wrong is the case's note. It is looked at in this order: is there an answer, does it change its inputs, is it
what the reference gives, do the judges (`accept`) agree.

What a learner is told of a wrong answer: of a visible case what he got and what was expected; of a hidden case the part
that is wrong, without numbers; the mistake, where the answer is what one of the exercise's mistakes gives. Two
mistakes may give the same on small inputs: of those that fit the first wrong case, told is the one that fits most.
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from labkit import channel
from labkit.compare import counted, difference, show
from labkit.evidence import Evidence
from labkit.exercises import Answer, Case, Exercise, Mistake, load_lab
from labkit.nursery import Failed
from labkit.parts import named, other_number, wrong_parts
from labkit.settings import PLAIN, Trial, place, trials
from labkit.verdict import Row, Verdict

NOT_TRIED = "not tried after that"
_HIDDEN = "the inputs and answers of this case stay hidden"
_MOST_INPUTS = 80  # characters of inputs that are shown before what is wrong


def conduct(lines: Sequence[socket.socket], control: socket.socket, job: dict[str, Any]) -> dict[str, Any]:
    """The verdict, and {case: trial} to be played once more, plain.

    In the middle it asks for what the learner's processes send when they have got the trials.
    """

    def work(asked: Exercise) -> dict[str, Any]:
        drawn = trials(asked, job["seed"])
        outcomes = channel.confer(control, [[trial.to_plain() for trial in case] for case in drawn])
        return _decide(asked, {**job, "outcomes": outcomes}, drawn)

    return _guarded(work, job)


def decide(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """As `conduct`, with the outcomes and those of the trials that were played once more (`again`)."""
    return _guarded(lambda asked: _decide(asked, job, trials(asked, job["seed"])), job)


def _guarded(work: Callable[[Exercise], Any], job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": work(load_lab(job["course"])[job["exercise"]])}
    except BaseException:
        raise Failed({"raised": traceback.format_exc(limit=-3)}) from None


def _decide(asked: Exercise, job: dict[str, Any], drawn: list[list[Trial]]) -> dict[str, Any]:
    outcomes = job["outcomes"]
    todo = [tried[-1]["todo"] for tried in outcomes if "todo" in tried[-1]]
    if len(todo) == len(outcomes):
        other = [name for name in todo if name != asked.name]
        note = f"it waits for exercise {other[0]}" if other else ""
        return {"verdict": Verdict(asked.name, "todo", asked.points, note=note).to_plain(), "again": {}}
    rows, known, again = list[Row](), list[tuple[str, ...]](), dict[int, Trial]()
    only_settings = True  # as far as it is seen, nothing is wrong where nothing is special
    answered = False  # with something wrong: beside an error the idea waits for the second failure
    for index, (case, of_case, tried) in enumerate(zip(asked.cases, drawn, outcomes, strict=True)):
        wrong, said, trial = _first_wrong(asked, case, of_case, tried)
        answered = answered or bool(wrong) and said is not None
        if wrong and said is None:
            first = all(not row.note for row in rows)
            words = {**asked.errors, **(case.errors if first else {})}
            said = next(((mistake,) for text, mistake in words.items() if text in wrong), None)
        if wrong and trial and trial.setting != PLAIN:
            again[index] = place(asked, trial.given, PLAIN, "")
            plain = job.get("again", {}).get(index)
            if plain and _wrong(asked, case, again[index], plain)[0] is None:
                wrong = f"{trial.setting.said}: {wrong}"
        elif wrong and trial:
            only_settings = False
        rows.append(Row(case.what, 0 if wrong else case.points, case.points, wrong or ""))
        known.append(said or ())
    passed = all(not row.note for row in rows)
    notes = {row.note for row in rows}
    everywhere = rows[0].note if len(notes) == 1 and "error" in outcomes[0][-1] else ""
    if passed:
        verdict = Verdict(asked.name, "passed", asked.points, tuple(rows))
    else:
        texts = everywhere, explains_most(known), asked.idea, asked.hint
        verdict = Verdict(asked.name, "wrong", asked.points, tuple(rows), *texts, answered=answered)
    asks = only_settings and "again" not in job
    return {
        "verdict": verdict.to_plain(),
        "again": {index: trial.to_plain() for index, trial in again.items()} if asks else {},
    }


def explains_most(known: Sequence[tuple[str, ...]]) -> str:
    """Of the mistakes that the first case with any knows, the one that most cases know; of equals the first."""
    first = next(filter(None, known), ())
    return max(first, key=lambda hint: sum(hint in of_case for of_case in known), default="")


def _first_wrong(
    asked: Exercise, case: Case, drawn: list[Trial], tried: list[dict[str, Any]]
) -> tuple[str | None, tuple[str, ...] | None, Trial | None]:
    """(what is wrong in the first trial that is, what `_wrong` says beside it, that trial or None: not tried)."""
    for trial, outcome in zip(drawn, tried, strict=False):
        wrong, said = _wrong(asked, case, trial, outcome)
        if wrong and said is not None and not case.hidden and len(drawn) > 1:
            wrong = f"{_with(trial.given)}{wrong}"
        if wrong:
            return wrong, said, None if outcome.get("error") == NOT_TRIED else trial
    if len(tried) < len(drawn):
        return "what it sent cannot be read", None, None
    return None, None, None


def _wrong(
    asked: Exercise, case: Case, trial: Trial, outcome: dict[str, Any]
) -> tuple[str | None, tuple[str, ...] | None]:
    """(what is wrong or None; the mistakes that give the same, None where an idea would say nothing)."""
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

    def apart(function: Any, hidden: bool) -> str | None:
        inputs = trial.inputs  # anew each time: the code that gets them may change them
        want = function(inputs) if isinstance(inputs, list) else function(**inputs)
        pairs = zip(value, want, strict=True) if on_ranks else [(value, want)]
        for rank, (one, other) in enumerate(pairs):
            try:
                phrase = _compared(asked, one, other, hidden)
            except Exception as error:  # a fault of ours, which must not read as one of the course's
                phrase = f"the answer cannot be compared ({type(error).__name__})"
            if phrase:
                return f"rank {rank}: {phrase}" if on_ranks else phrase
        return None

    def made(mistake: Mistake) -> bool:
        try:
            return apart(mistake.answer, hidden=False) is None
        except RuntimeError:
            if trial.setting.double:  # a mistake need not compute in float64
                return False
            raise

    reference = case.reference or asked.reference
    phrase = apart(reference, case.hidden) if reference else None
    known = tuple(mistake.hint for mistake in asked.mistakes if made(mistake)) if phrase else ()
    if changed:
        return f"it changes its input `{min(changed)}`: compute on a copy", known or None
    if phrase:
        return phrase, known
    for accept in (*asked.accept, *case.accept):
        try:
            sentence = accept(Answer(value, trial.inputs, evidence))
        except Exception as error:  # an answer of a form that the judge did not expect is a wrong answer
            sentence = f"the answer has not the form that was asked for ({type(error).__name__})"
        if sentence:
            return sentence, () if _compares(asked) else tuple(m.hint for m in asked.mistakes if made(m))
    return None, None


def _compares(asked: Exercise) -> bool:
    """Whether any case has a reference: then an answer that only `accept` refuses is right in value, and no mistake."""
    return asked.reference is not None or any(case.reference for case in asked.cases)


def _compared(asked: Exercise, got: Any, want: Any, hidden: bool) -> str | None:
    """How one rank's answer departs from what was expected, or None; without numbers where they are hidden."""
    one, other = named(got, asked.outputs), named(want, asked.outputs)
    if other is not want and (few := other_number(one, asked.outputs)):
        return few
    phrase = counted(one, other) if asked.counted else difference(one, other, asked.rtol, asked.atol)
    return f"{wrong_parts(one, other, asked.rtol, asked.atol)}; {_HIDDEN}" if phrase and hidden else phrase


def _with(given: Any) -> str:
    """The inputs that were tried, where they are short; of a case that tries several."""
    if not isinstance(given, dict) or not all(isinstance(value, bool | int | float | str) for value in given.values()):
        return ""
    text = ", ".join(f"{name}={show(value)}" for name, value in given.items())
    return f"with {text}: " if len(text) <= _MOST_INPUTS else ""
