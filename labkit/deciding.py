"""Draw and decide: the course's own code, in processes of its own, before and after the learner's.

    conduct   exercise, seed             -> asks with the trials of every case, plain; gets an outcome a trial
                                         -> the verdict, and the trials to be played once more, plain
    decide    exercise, seed, outcomes   -> the same verdict after some trials have been played once more; it asks what
                                         the suspected mistakes give on trials that are beside the first wrong ones

Both compare with references after the trials have been played; `decide` draws again. The first wrong trial of a case
becomes the case's note. Checks run in this order: is there an answer, does it change its inputs, has it waited for what
it has started, does it equal the reference, do the judges (`accept`) agree.

Feedback about a wrong answer: for a visible case the answer and the expected one; for a hidden case the part that is
wrong, without numbers; the mistake, if a known one gives every wrong answer, and the right one where the learner does
(`Suspects`).
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from labkit import plain
from labkit.compare import counted, difference, show
from labkit.evidence import Evidence
from labkit.exercises import Answer, Case, Exercise, load_lab
from labkit.nursery import Failed
from labkit.parts import named, other_number, wrong_parts
from labkit.settings import PLAIN, Trial, place, trials
from labkit.suspects import Suspects
from labkit.verdict import Row, Verdict

NOT_TRIED = "not tried after that"
_HIDDEN = "the inputs and answers of this case stay hidden"
_MOST_INPUTS = 80  # characters of inputs that are shown before what is wrong
_MORE_ALONE = 8  # of each case: trials in one process on which a suspected mistake must fit, too
_MORE_ON_RANKS = 2  # of all cases: these start processes and a group


_More = tuple[Callable[..., Any], Trial, Any]  # the reference, the trial, the learner's value


def conduct(control: socket.socket, job: dict[str, Any]) -> dict[str, Any]:
    """The verdict, and {case: trial} to be played once more, plain.

    In between it asks the judge for the outcomes of the learner's processes.
    """

    def work(asked: Exercise) -> dict[str, Any]:
        drawn = trials(asked, job["seed"])
        outcomes = plain.confer(control, [[trial.to_plain() for trial in case] for case in drawn])
        return _decide(asked, {**job, "outcomes": outcomes}, drawn)

    return _guarded(work, job)


def decide(control: socket.socket, job: dict[str, Any]) -> dict[str, Any]:
    """As `conduct`, with the outcomes and those of the trials that were played once more (`again`).

    Where known mistakes are suspected it asks the judge for their values on more trials.
    """

    def work(asked: Exercise) -> dict[str, Any]:
        return _decide(asked, job, trials(asked, job["seed"]), lambda question: plain.confer(control, question))

    return _guarded(work, job)


def _guarded(work: Callable[[Exercise], Any], job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": work(load_lab(job["course"])[job["exercise"]])}
    except BaseException:
        raise Failed({"raised": traceback.format_exc(limit=-3)}) from None


def _decide(
    asked: Exercise, job: dict[str, Any], drawn: list[list[Trial]], ask: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    outcomes = job["outcomes"]
    todo = [tried[-1]["todo"] for tried in outcomes if "todo" in tried[-1]]
    if len(todo) == len(outcomes):
        other = [name for name in todo if name != asked.name]
        note = f"it waits for exercise {other[0]}" if other else ""
        return {"verdict": Verdict(asked.name, "todo", asked.points, note=note).to_plain(), "again": {}, "wrong": {}}
    rows, again, wrong_trials = list[Row](), dict[int, Trial](), dict[int, Trial]()
    suspects, raised = Suspects(asked, job.get("hints", [])), list[tuple[Trial, str]]()
    of_first: Mapping[str, str] = {}  # what errors mean where the first case that fails has them
    only_settings = True  # as far as it is seen, nothing is wrong where nothing is special
    for index, (case, of_case, tried) in enumerate(zip(asked.cases, drawn, outcomes, strict=True)):
        given = job.get("known", {}).get(index)  # what known mistakes give on the first wrong trial
        last = tried[-1]
        wrong, how, trial = _first_wrong(asked, case, of_case, tried, suspects, given)
        if trial and how == VALUE:
            wrong_trials[index] = trial
        if wrong and not any(row.note for row in rows):
            of_first = case.errors
        words = {**asked.errors, **of_first} if how is None else of_first if how == REFUSED else {}
        hint = next((mistake for text, mistake in words.items() if wrong and text in wrong), "")
        if wrong and (how is None or hint):
            own = [(trial, last["raised"])] if trial and last.get("error") == wrong and "raised" in last else []
            raised += own
            suspects.named(hint, tried=not own)  # which known mistakes raise the same, `_rule_out` asks
        if wrong and trial and trial.setting != PLAIN:
            again[index] = place(asked, trial.given, PLAIN, "")
            plain = job.get("again", {}).get(index)
            if plain and _wrong(asked, case, again[index], plain, Suspects(asked))[0] is None:
                wrong = f"{trial.setting.said}: {wrong}"
        elif wrong and trial:
            only_settings = False
        rows.append(Row(case.what, 0 if wrong else case.points, case.points, wrong or ""))
    passed = all(not row.note for row in rows)
    notes = {row.note for row in rows}
    everywhere = rows[0].note if len(notes) == 1 and "error" in outcomes[0][-1] else ""
    if passed:
        verdict = Verdict(asked.name, "passed", asked.points, tuple(rows))
    else:
        tried = not all(of_case[-1].get("unread") for of_case in outcomes)
        if ask:
            _rule_out(asked, suspects, list(_more(asked, drawn, outcomes, wrong_trials)), raised, ask)
        texts = everywhere, suspects.told(), asked.idea
        verdict = Verdict(asked.name, "wrong", asked.points, tuple(rows), *texts, tried=tried)
    asks = "again" not in job
    return {
        "verdict": verdict.to_plain(),
        "again": {index: trial.to_plain() for index, trial in again.items()} if asks and only_settings else {},
        "wrong": {index: trial.to_plain() for index, trial in wrong_trials.items()} if asks else {},
    }


def _more(
    asked: Exercise, drawn: Sequence[Sequence[Trial]], outcomes: Sequence[Sequence[dict[str, Any]]],
    seen: Mapping[int, Trial],
) -> Iterator[_More]:  # fmt: skip
    """Trials with an answer and a reference beside the first wrong one of each case, right ones or wrong ones."""
    left = _MORE_ON_RANKS
    for index, case in enumerate(asked.cases):
        reference = case.reference or asked.reference
        others = [
            (trial, outcome["answers"])
            for trial, outcome in zip(drawn[index], outcomes[index], strict=False)
            if "answers" in outcome and trial is not seen.get(index) and not trial.setting.double
        ]
        for trial, answers in others[:_MORE_ALONE]:
            if not reference:
                break
            if not trial.world:
                yield reference, trial, answers[0]
            elif left:
                left -= 1
                yield reference, trial, answers
                break


def _rule_out(
    asked: Exercise, suspects: Suspects, more: Sequence[_More], raised: Sequence[tuple[Trial, str]],
    ask: Callable[[Any], Any],
) -> None:  # fmt: skip
    """Rule out the suspected mistakes that do not fit on some more trials.

    One fits where it gives the learner's value, or where both are right: there may be several right values; and where
    it raises the error that the learner's cell has raised.
    """
    if not (more or raised) or not (ways := suspects.suspected()):
        return
    alike = [trial.to_plain() for _, trial, _ in more], *([trial.to_plain()] for trial, _ in raised)
    found, *of_errors = ask({"ways": ways, "trials": alike})  # one question

    def fits(one: _More, value: Any) -> bool:
        reference, trial, got = one
        return _apart(asked, trial, got, value) is None or (
            _apart(asked, trial, got, want := _called(reference, trial)) is None
            and _apart(asked, trial, value, want) is None
        )  # fmt: skip

    for number, way in enumerate(ways):
        same = all(said[number] == error for (_, error), said in zip(raised, of_errors, strict=True))
        values = found[number] if more else []
        if not same or not isinstance(values, list) or not all(map(fits, more, values)):
            suspects.rule_out(way)


def _called(function: Callable[..., Any], trial: Trial) -> Any:
    """What a function of the course gives on the inputs of a trial, made anew: it may change them."""
    inputs = trial.inputs
    return function(inputs) if isinstance(inputs, list) else function(**inputs)


def _apart(asked: Exercise, trial: Trial, value: Any, want: Any, hidden: bool = False) -> str | None:
    """How the value of a trial, by rank or alone, differs from the expected one, or None."""
    on_ranks = isinstance(trial.given, list)
    for rank, (one, other) in enumerate(zip(value, want, strict=True) if on_ranks else [(value, want)]):
        try:
            phrase = _compared(asked, one, other, hidden)
        except Exception as error:  # a fault of ours, which must not read as one of the course's
            phrase = f"the answer cannot be compared ({type(error).__name__})"
        if phrase:
            return f"rank {rank}: {phrase}" if on_ranks else phrase
    return None


# How a trial is wrong; None: there is no answer, or one that was computed by destroying its inputs.
VALUE = "it is not what was asked for"
REFUSED = "its value is right, and a judge refuses it"


def _first_wrong(
    asked: Exercise, case: Case, drawn: list[Trial], tried: list[dict[str, Any]], suspects: Suspects,
    known: Sequence[tuple[int, Any]] | None,
) -> tuple[str | None, str | None, Trial | None]:  # fmt: skip
    """(What is wrong in the first wrong trial, how, that trial or None: not tried); the suspects see all trials."""
    first: tuple[str | None, str | None, Trial | None] | None = None
    for trial, outcome in zip(drawn, tried, strict=False):
        wrong, how = _wrong(asked, case, trial, outcome, suspects, known if first is None else None)
        if wrong and first is None:
            if how is not None and not case.hidden and len(drawn) > 1:
                wrong = f"{_with(trial.given)}{wrong}"
            first = wrong, how, None if outcome.get("error") == NOT_TRIED else trial
    if first is None and len(tried) < len(drawn):
        return "what it sent cannot be read", None, None
    return first or (None, None, None)


def _wrong(
    asked: Exercise, case: Case, trial: Trial, outcome: dict[str, Any], suspects: Suspects,
    known: Sequence[tuple[int, Any]] | None = None,
) -> tuple[str | None, str | None]:  # fmt: skip
    """(what is wrong or None, how); the suspects see it.

    Args:
        known: (number, value on this trial: by rank, or alone) of each known mistake; None: they were not tried.
    """
    if "todo" in outcome:
        return "not done yet", None
    if "error" in outcome:
        return outcome["error"], None
    on_ranks = isinstance(trial.given, list)
    try:
        value = outcome["answers"] if on_ranks else outcome["answers"][0]
        evidence = [Evidence.from_plain(one) for one in outcome["evidence"]]
        changed = {str(name) for of_rank in outcome["changed"] for name in of_rank}.difference(asked.changes)
    except Exception:  # whatever a hostile process writes in the place of its evidence
        return "what it sent cannot be read", None

    def explained() -> list[int] | None:
        return None if known is None else [way for way, want in known if _apart(asked, trial, value, want) is None]

    if changed:
        return f"it changes its input `{min(changed)}`: compute on a copy", None
    if unfinished := _never_waited_for(evidence):
        return unfinished, None
    reference = case.reference or asked.reference
    if reference and (phrase := _apart(asked, trial, value, _called(reference, trial), case.hidden)):
        suspects.seen(explained())
        return phrase, VALUE
    for accept in (*asked.accept, *case.accept):
        try:
            sentence = accept(Answer(value, trial.inputs, evidence))
        except Exception as error:  # an answer of a form that the judge did not expect is a wrong answer
            sentence = f"the answer has not the form that was asked for ({type(error).__name__})"
        if sentence:
            if not _compares(asked):  # else the answer is right in value, and no mistake
                suspects.seen(explained())
                return sentence, VALUE
            return sentence, REFUSED
    return None, None


def _never_waited_for(evidence: Sequence[Evidence]) -> str | None:
    """A communication that was never waited for, if there is one: what it brings has not arrived."""
    for rank, one in enumerate(evidence):
        if call := next((call for call in one.calls if call.waited is None and call.name != "send"), None):
            return f"rank {rank} never waits for its {call.name}: what it brings may not be there when it is used"
    return None


def _compares(asked: Exercise) -> bool:
    """Whether any case has a reference: then an answer that only `accept` refuses is right in value, and no mistake."""
    return asked.reference is not None or any(case.reference for case in asked.cases)


def _compared(asked: Exercise, got: Any, want: Any, hidden: bool) -> str | None:
    """The difference between one rank's answer and the expected one, or None; without numbers for a hidden case."""
    one, other = named(got, asked.outputs), named(want, asked.outputs)
    if other is not want and (few := other_number(one, asked.outputs)):
        return few
    phrase = counted(one, other) if asked.counted else difference(one, other, asked.rtol, asked.atol)
    return f"{wrong_parts(one, other, asked.rtol, asked.atol)}; {_HIDDEN}" if phrase and hidden else phrase


def _with(given: Any) -> str:
    """The inputs that were tried, if they are short, for a case that tries several."""
    if not isinstance(given, dict) or not all(isinstance(value, bool | int | float | str) for value in given.values()):
        return ""
    text = ", ".join(f"{name}={show(value)}" for name, value in given.items())
    return f"with {text}: " if len(text) <= _MOST_INPUTS else ""
