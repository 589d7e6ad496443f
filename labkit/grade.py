"""`minimegatron grade SUBMISSIONS/ --out marks.csv`: mark a class, safely, from what learners handed in.

Notebooks are never run as a whole and their outputs are not read. Each exercise is pulled out by its name and judged as
`check` judges it, in fresh processes with limits, on hidden cases drawn anew for this run.

| to read              | its one idea                                                        |
|----------------------|---------------------------------------------------------------------|
| `handed_in`          | whose file it is, and what of a folder is read                      |
| `notebook_file`      | the cells of one file, at a bounded cost                            |
| `submissions`        | exercises by name, nothing run                                      |
| `grading`            | many submissions through one judge                                  |
| `marks`, `report`    | what is written                                                     |
| `regrade`            | the same run again, or what has changed since                       |
| `sandbox`, `fresh`   | what a submission can do to the machine                             |
| `promises`           | whether that holds on this machine                                  |
| `acceptance`         | a capstone: a program that is run, and held against criteria        |

Exit status: 0 all submissions were graded, however bad they are; 1 a check of the course failed, or this program, or
the machine has no compiler for what was handed in, or marks are not those of the run that is repeated; 2 the command
line, or a machine that does not keep submissions apart; 4 nothing to grade; 5 the machine could not start processes;
130 interrupted, and the marks so far are written.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import os
import pkgutil
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit import acceptance, promises, regrade, report
from labkit import marks as files
from labkit.exercises import Lab, load_lab
from labkit.fresh import Nursery
from labkit.grading import Course, Mark, grade
from labkit.handed_in import passed_over
from labkit.shown import clean
from labkit.submissions import collect
from minimegatron.bars import tqdm
from minimegatron.errors import ConfigError, did_you_mean
from minimegatron.flags import Parser

_WIDEST = 40  # of a column of names; one that is longer moves its own line only
_EPILOG = """
SUBMISSIONS holds a notebook a learner (ada.ipynb) or a folder a learner (ada/anything.ipynb, or as nbgrader collects
them, ada/01_process_groups/01_process_groups.ipynb). File names do not matter; .py in Jupytext's percent format too.

Examples:
  minimegatron grade submitted/ --out marks.csv
  minimegatron grade submitted/ --lab 01_process_groups --out marks.csv --json marks.json --report report.html
  minimegatron grade submitted/ --only ring_all_reduce,overlap --seed 6f0c...   # the same questions again
  minimegatron grade submitted/ --regrade marks.json --out again.csv            # a complaint: the same run again

A capstone is run, not called: minimegatron grade FOLDER --capstone 04 --help, docs/capstones.md.

Exit status: 0 graded, 1 a check of the course failed, 2 wrong command line, or a machine that does not keep submissions
apart, 4 nothing to grade, 130 interrupted (the marks so far are written).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command.

    Raises:
        MinimegatronError: with the exit status of its class.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if any(word.split("=")[0] == "--capstone" for word in words):
        return acceptance.main(words)
    options = _options(argv)
    earlier = _as_before(options) if options.regrade else None
    courses = known_courses(options.course)
    only_lab = _choose_lab(options.lab, courses)
    if options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs}", fix="at least 1")
    for path in filter(None, (options.out, options.json, options.report)):
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigError(f"{path} cannot be written", fix="name a file in a folder that exists")
    labs = {name: course.lab for name, course in courses.items()}
    submissions = collect(options.submissions, labs, only_lab)
    only = _choose_exercises(options.only, [labs[one.lab] for one in submissions if one.lab in labs])
    if earlier:
        earlier.refuse_changes(submissions, courses)
    run: dict[str, Any] = {
        "seed": options.seed or secrets.token_hex(16),
        "options": {"lab": options.lab, "only": options.only, "course": options.course},
        "versions": regrade.versions(),
        "checks": regrade.checks(submissions, courses),
    }
    with contextlib.ExitStack() as stack:
        nurseries = [stack.enter_context(Nursery()) for _ in range(min(options.jobs, len(submissions)))]
        for nursery in nurseries:
            nursery.warm_up()
        run["prevented"] = promises.tried(nurseries[0], [options.submissions])
        run["trusted"] = options.trust
        if not options.trust:
            promises.required(run["prevented"])
        bar = stack.enter_context(tqdm(total=len(submissions), unit="submission", disable=options.quiet or None))

        def on_mark(mark: Mark) -> None:
            bar.set_postfix_str(f"{mark.learner} {mark.points}/{mark.of}")
            bar.update()

        marks, interrupted = grade(
            submissions, courses, seed=run["seed"], nurseries=nurseries, only=only, on_mark=on_mark
        )
    run["complete"] = not interrupted
    marks = [_remarked(mark, run["prevented"]) for mark in marks]
    _write(options, marks, run)
    print(f"{summary(marks)}\nseed of the hidden cases: {run['seed']}")
    if interrupted:
        print(f"interrupted: {len(marks)} of {len(submissions)} submissions are graded", file=sys.stderr)
        return 130
    return _complaints(options.submissions, marks, earlier)


def _complaints(folder: Path, marks: Sequence[Mark], earlier: regrade.Earlier | None) -> int:
    """Tell the instructor about failures that are not the learners' fault; returns the exit status."""
    complaints = []
    by_what: dict[str, list[str]] = {}
    for mark in marks:
        for name, what in mark.faults.items():
            by_what.setdefault(what if name else "could not be read", []).append(name or mark.learner)
    for what, names in by_what.items():
        different = list(dict.fromkeys(names))
        some = ", ".join(different[:8]) + (", ..." if len(different) > 8 else "")
        if what == "the check itself failed":
            what = "the course's own checks failed"
        complaints.append(f"{what}: {some} ({len(names)} times); see the remarks")
    if earlier and (changed := earlier.changed_marks(files.as_rows(marks))):
        complaints.append(f"not the same as before, with the same seed and checks: {', '.join(changed)}")
    print("\n".join(map(clean, complaints)), end="\n" if complaints else "", file=sys.stderr)
    if over := passed_over(folder):
        print(clean(f"taken for the instructor's own, not read: {', '.join(over)}"), file=sys.stderr)
    return 1 if complaints else 0


def _as_before(options: argparse.Namespace) -> regrade.Earlier:
    """The earlier run that is repeated; its options become this run's.

    Raises:
        ConfigError: it cannot be read, or an option asks for something else.
    """
    earlier = regrade.Earlier(options.regrade)
    for name, was in {**earlier.options, "seed": earlier.seed}.items():
        given = getattr(options, name)
        if given not in ("", was) and not (name == "course" and given == "course"):
            raise ConfigError(f"--regrade and --{name} {given}: the earlier run had `{was}`", fix=f"leave --{name} out")
        setattr(options, name, was)
    return earlier


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        "minimegatron grade", description="Grade a folder of submissions.", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("submissions", type=Path, metavar="SUBMISSIONS", help="folder with what learners handed in")
    parser.add_argument("--out", type=Path, metavar="CSV", help="marks as a table, a row a learner")
    parser.add_argument("--json", type=Path, metavar="FILE", help="marks with every case, reason, hint, and the seed")
    parser.add_argument("--report", type=Path, metavar="HTML", help="a page for the instructor: who, what, why")
    parser.add_argument("--feedback", type=Path, metavar="DIR", help="a page for each learner: what check() shows")
    parser.add_argument("--lab", default="", help="grade this lab only; also says which lab it is where a notebook "
                        "does not. A name, a number, or a module of your own that ends in LAB = Lab(...)")  # fmt: skip
    parser.add_argument("--course", default="course", metavar="PACKAGE", help="where labs are declared (course)")
    parser.add_argument("--only", default="", metavar="NAME,...", help="these exercises only")
    parser.add_argument("--jobs", type=int, default=1, help="submissions at once (1); an exercise takes up to 4 ranks")
    parser.add_argument("--seed", default="", help="of the hidden cases; by default a new secret one, kept in --json")
    parser.add_argument("--trust", action="store_true", help="grade although this machine does not keep submissions "
                        "apart; the marks say so")  # fmt: skip
    parser.add_argument("--regrade", type=Path, metavar="JSON", help="grade as in the run that wrote this --json: "
                        "the same marks, byte for byte, or what has changed since")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(argv)


def known_courses(package: str) -> dict[str, Course]:
    """The labs of a course, by name: the folders `NN_name` of its package.

    Raises:
        ConfigError: there is no such package.
    """
    try:
        folder = importlib.import_module(package).__path__
    except ModuleNotFoundError as error:
        fix = "--course with a package on PYTHONPATH"
        raise ConfigError(f"there is no course `{package}`: {error}", fix=fix) from error
    found = {}
    for info in sorted(pkgutil.iter_modules(folder), key=lambda one: one.name):
        if info.ispkg and re.match(r"\d\d_", info.name):
            module = f"{package}.{info.name}"
            found[load_lab(module).name] = Course(module, load_lab(module))
    return found


def _choose_lab(wanted: str, courses: dict[str, Course]) -> str:
    """The name of the one lab that is graded, or "". A module of the instructor's joins `courses`."""
    if not wanted:
        return ""
    if "." in wanted:
        lab = load_lab(wanted)
        courses[lab.name] = Course(wanted, lab)
        return lab.name
    named = [name for name in courses if name == wanted or name.split("_")[0] == wanted]
    if not named:
        raise ConfigError(
            f"there is no lab `{wanted}`", fix=did_you_mean(wanted, courses) or f"one of {', '.join(courses)}"
        )
    return named[0]


def _choose_exercises(wanted: str, labs: Sequence[Lab]) -> tuple[str, ...]:
    names = tuple(filter(None, (name.strip() for name in wanted.split(","))))
    there = [name for lab in labs for name in lab.exercises]
    if unknown := [name for name in names if name not in there]:
        near = did_you_mean(unknown[0], there) or f"there are {', '.join(dict.fromkeys(there))}"
        raise ConfigError(f"no exercise `{unknown[0]}` in what was handed in", fix=near)
    return names


def _remarked(mark: Mark, prevented: Mapping[str, bool]) -> Mark:
    """A mark with remarks about what the submission could have done on a machine without a complete sandbox."""
    could = [name for name, held in prevented.items() if not held]
    remarks = (f"on trust: it could {', '.join(could)}",) if could else ()
    submission = dataclasses.replace(mark.submission, remarks=(*mark.submission.remarks, *remarks))
    return dataclasses.replace(mark, submission=submission)


def _write(options: argparse.Namespace, marks: Sequence[Mark], run: Mapping[str, Any]) -> None:
    for path, text in _texts(options, marks, run):
        files.write(path, text)
    if options.feedback is not None:
        files.feedback(marks, options.feedback)


def _texts(options: argparse.Namespace, marks: Sequence[Mark], run: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    if options.out is not None:
        yield options.out, files.as_csv(marks)
    if options.json is not None:
        yield options.json, files.as_json(marks, run)
    if options.report is not None:
        yield options.report, report.as_html(marks, run)


def summary(marks: Sequence[Mark]) -> str:
    """A line a learner and lab."""
    who = [(mark.learner, mark.lab) for mark in marks]
    wide = [min(max((len(names[i]) for names in who), default=0), _WIDEST) for i in range(2)]
    return "\n".join(
        f"{mark.learner:<{wide[0]}}  {mark.lab:<{wide[1]}}  {mark.points:>3}/{mark.of:<3} {mark.percent:>5.1f} %  "
        f"{'; '.join(mark.remarks)}".rstrip()
        for mark in marks
    )
