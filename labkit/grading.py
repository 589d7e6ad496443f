"""Grades many submissions with one judge: the same hidden cases for all, one mark each, whatever they contain.

    submissions ──> [judge of each exercise, in fresh processes] ──> marks, in the submissions' order

Every learner of one run gets the same seed, so all are asked the same questions; the seed is in the marks, and
`--seed` asks them again. A submission that crashes, loops or cannot be read gets 0 with the reason, and the next one is
graded. An interrupt keeps the marks so far.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from labkit.exercises import Lab
from labkit.fresh import Nursery
from labkit.judge import CourseError, judge
from labkit.shown import clean, named
from labkit.submissions import Submission
from labkit.verdict import Verdict
from minimegatron.errors import MinimegatronError, RankError
from minimegatron.kernels.build import KernelsUnavailable


@dataclasses.dataclass(frozen=True)
class Course:
    """A lab, and the module that holds its checks."""

    module: str
    lab: Lab


@dataclasses.dataclass(frozen=True)
class Mark:
    """One learner's result in one lab.

    Attributes:
        submission: the submission.
        verdicts: one per exercise asked, in the lab's order.
        seconds: how long each took to judge.
        faults: {exercise: what happened} for faults of the course, the machine or this program. The reader's fault has
            the name "".
    """

    submission: Submission
    verdicts: tuple[Verdict, ...]
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    faults: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def learner(self) -> str:
        """The name, cleaned for display."""
        return named(self.submission.learner)

    @property
    def lab(self) -> str:
        return clean(self.submission.lab)

    @property
    def file(self) -> str:
        return named(self.submission.file)

    @property
    def points(self) -> int:
        return sum(verdict.points for verdict in self.verdicts)

    @property
    def of(self) -> int:
        return sum(verdict.of for verdict in self.verdicts)

    @property
    def percent(self) -> float:
        return round(100 * self.points / self.of, 1) if self.of else 0.0

    @property
    def remarks(self) -> tuple[str, ...]:
        reason = self.submission.reason
        failed = tuple(f"{name}: {what}" for name, what in self.faults.items() if name)
        return tuple(map(clean, ((f"not graded: {reason}",) if reason else ()) + self.submission.remarks + failed))


class Stopped(Exception):
    """The run was interrupted while this submission was graded."""


def grade(
    submissions: Sequence[Submission],
    courses: Mapping[str, Course],
    *,
    seed: str,
    nurseries: Sequence[Nursery],
    only: Sequence[str] = (),
    on_mark: Callable[[Mark], None] = lambda mark: None,
) -> tuple[list[Mark], bool]:
    """Grade all submissions.

    Args:
        courses: by name of the lab.
        seed: seed of the hidden cases.
        nurseries: servers of processes; as many submissions are graded at once. An interrupt ends them.
        only: exercises; by default all of the lab.
        on_mark: called in this thread after each submission.

    Returns:
        The marks in the order of the submissions, and whether the run was interrupted and some are missing.
    """
    marks: dict[int, Mark] = {}
    idle: queue.SimpleQueue[Nursery] = queue.SimpleQueue()
    stop = threading.Event()
    for nursery in nurseries:
        nursery.warm_up()
        idle.put(nursery)

    def work(submission: Submission) -> Mark:
        nursery = idle.get(timeout=1)  # there are as many as threads
        try:
            return _mark(nursery, submission, courses.get(submission.lab), seed, only, stop)
        finally:
            idle.put(nursery)

    interrupted = False
    with ThreadPoolExecutor(len(nurseries), "grade") as pool:
        waiting: dict[Future[Mark], int] = {pool.submit(work, one): i for i, one in enumerate(submissions)}
        try:
            while waiting:
                done, _ = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    marks[waiting.pop(future)] = mark = future.result(timeout=0)
                    on_mark(mark)
        except KeyboardInterrupt:
            interrupted = True
        finally:  # nothing waits any more, or nothing will
            stop.set()
            for future in waiting:
                future.cancel()
            for nursery in nurseries if waiting else ():
                nursery.interrupt()
    return [marks[index] for index in sorted(marks)], interrupted


def _mark(
    nursery: Nursery, submission: Submission, course: Course | None, seed: str, only: Sequence[str], stop: Any
) -> Mark:
    faults = {"": clean(submission.fault)} if submission.fault else {}
    if course is None:
        return Mark(submission, (), faults=faults)
    verdicts, seconds = [], {}
    for name, exercise in course.lab.exercises.items():
        if only and name not in only:
            continue
        if submission.reason or name not in submission.sources:
            note = "" if submission.reason else "there is no such cell in the notebook"
            verdicts.append(Verdict(name, "todo", exercise.points, note=note))
            continue
        started = time.monotonic()
        try:
            verdict = _judge(nursery, course.module, name, submission.sources, seed, stop)
        except Exception as error:  # one submission ends at most itself
            if stop.is_set():
                raise Stopped from None
            faults[name] = clean(_fault(error, course.lab.name))
            why = error.what.splitlines()[-1] if isinstance(error, MinimegatronError) else type(error).__name__
            verdict = Verdict(name, "wrong", exercise.points, note=f"could not be graded: {why}")
        verdicts.append(verdict)
        seconds[name] = time.monotonic() - started
    return Mark(submission, tuple(verdicts), seconds, faults)


def _fault(error: Exception, lab: str) -> str:
    """Why an exercise could not be judged, and whose fault that is, in one line."""
    if isinstance(error, KernelsUnavailable):
        return f"{error.what}: the kernels of lab {lab} were not graded"
    if isinstance(error, CourseError):
        return "the check itself failed"
    if isinstance(error, MinimegatronError):
        return f"it could not be judged: {error.what}"
    return f"the judge failed ({type(error).__name__}: {str(error)[:200]})"


def _judge(nursery: Nursery, module: str, name: str, sources: Mapping[str, str], seed: str, stop: Any) -> Verdict:
    """A verdict; tried again if the machine has ended the server (memory, a kill)."""
    try:
        return judge(nursery, module, name, sources, seed)
    except RankError:
        if stop.is_set():
            raise
        return judge(nursery, module, name, sources, seed)
