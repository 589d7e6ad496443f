"""`minimegatron grade HANDED_IN --capstone NN`: run what a learner built, and hold it against published criteria.

A lab's exercise is a function, which is called; a capstone is a program, which is run. Its criteria are about what it
does, seen from outside, and any program that does it passes.

    folder with the hand-in ──> Capstone.run, on inputs drawn anew ──> Result of each criterion ──> table, CSV, JSON

Names, points and limits of the criteria are published (docs/capstones.md); the seed of what they ask is drawn when
grading begins. A criterion is met or not. A learner's own grading is the same program. The JSON has the seed, the
versions of what has graded, and the facts of the machine.

An author declares criteria in the order in which they are tried::

    CRITERIA = Criteria()

    @CRITERIA(10, "what has to hold, as docs/capstones.md has it")
    def resumed(session) -> str:
        require(same, "step 31 has the loss 5.12, where it is 5.11")      # Missed: the criterion is not met, and why
        return "270 losses are equal"                                    # met, and what was seen

`minimegatron capstone NN FOLDER` copies its `start/` (`labkit/begin`); what it runs is a `Program` (`labkit/program`).

**What is handed in is run with your rights**, in no sandbox: it is a server, a training, a measurement. Read it first,
or grade in a container.

Exit status: 0 graded, however bad; 2 the command line; 4 nothing to grade; 130 interrupted.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import importlib
import io
import json
import os
import pkgutil
import platform
import re
import secrets
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

from labkit import marks as files
from labkit.regrade import versions
from labkit.shown import clean
from minimegatron.errors import ConfigError, DataError, MinimegatronError, did_you_mean
from minimegatron.flags import Parser
from minimegatron.launch.drivers import nvidia_smi
from minimegatron.launch.procs import usable_cores

T = TypeVar("T")
Try = TypeVar("Try", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Criterion:
    """One thing that a hand-in has to do.

    Attributes:
        name: in tables, and of `--only`.
        points: all or none.
        limit: what has to hold, as it is published.
    """

    name: str
    points: int
    limit: str


@dataclasses.dataclass(frozen=True)
class Result:
    """Whether a criterion is met.

    Attributes:
        told: what was seen; where it is not met, what was wanted instead.
    """

    criterion: Criterion
    met: bool
    told: str

    @property
    def points(self) -> int:
        return self.criterion.points if self.met else 0


Tell = Callable[[Result], None]


class Missed(Exception):
    """A criterion is not met, or out of `Capstone.run` none that is left can be tried; and why."""


FAULTS = (Missed, OSError, MinimegatronError)  # of a hand-in, while a criterion is tried


def require(holds: bool, told: str) -> None:
    """Raise `Missed` unless something holds."""
    if not holds:
        raise Missed(told)


def once(method: Callable[[Any], T]) -> Callable[[Any], T]:
    """A method whose value is kept, or what it has raised of `FAULTS`: a run that has failed is not tried again."""
    name = f"_once_{method.__name__}"

    @functools.wraps(method)
    def kept(self: Any) -> T:
        if name not in vars(self):
            try:
                vars(self)[name] = method(self), None
            except FAULTS as error:
                vars(self)[name] = None, error
        value, raised = vars(self)[name]
        if raised is not None:
            raise raised
        return value  # type: ignore[no-any-return]

    return kept


class Criteria(Generic[Try]):
    """The criteria of a capstone, in the order of their functions: each returns what was seen, or raises `Missed`."""

    def __init__(self) -> None:
        self._tries: dict[Criterion, Try] = {}

    def __call__(self, points: int, limit: str) -> Callable[[Try], Try]:
        """A decorator: the function is a criterion of its name."""

        def declare(function: Try) -> Try:
            self._tries[Criterion(function.__name__, points, limit)] = function
            return function

        return declare

    def __iter__(self) -> Iterator[Criterion]:
        return iter(self._tries)

    def function(self, criterion: Criterion) -> Try:
        """What tries it."""
        return self._tries[criterion]

    def result(self, criterion: Criterion, *evidence: Any) -> Result:
        """Call the function of a criterion."""
        try:
            return Result(criterion, True, self.function(criterion)(*evidence))
        except FAULTS as error:
            return missed(criterion, error)


def missed(criterion: Criterion, error: Exception) -> Result:
    """The result of a criterion whose function has raised."""
    return Result(criterion, False, str(error) if isinstance(error, Missed) else f"{type(error).__name__}: {error}")


@dataclasses.dataclass(frozen=True)
class Capstone:
    """A project with criteria.

    Attributes:
        name: its folder in `course/capstones`.
        file: what a folder holds that is a hand-in.
        criteria: in the order in which they are tried.
        options: adds the command line's own of this capstone.
        run: (folder, options, random, tell): tries each criterion of `options.criteria`, and tells each result. Where
            it raises `Missed`, those that it has not told are not met.
    """

    name: str
    file: str
    criteria: Sequence[Criterion]
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Path, argparse.Namespace, Random, Tell], None]


def known(package: str = "course.capstones") -> dict[str, str]:
    """Capstones by name: {name: its module}."""
    found = importlib.import_module(package).__path__
    names = sorted(info.name for info in pkgutil.iter_modules(found) if info.ispkg and re.match(r"\d\d_", info.name))
    return {name: f"{package}.{name}" for name in names}


def load(wanted: str) -> Capstone:
    """A capstone by its name or number.

    Raises:
        ConfigError: there is none.
    """
    modules = known()
    for name, module in modules.items():
        if wanted in (name, name.split("_")[0], name.split("_")[0].lstrip("0")):
            capstone = importlib.import_module(module).CAPSTONE
            assert isinstance(capstone, Capstone), module
            return capstone
    fix = did_you_mean(wanted, modules) or f"one of {', '.join(modules)}"
    raise ConfigError(f"there is no capstone `{wanted}`", fix=fix)


def folder_of(name: str) -> Path:
    """Where a capstone's files are, by its full name."""
    return Path(str(importlib.import_module(known()[name]).__file__)).parent


def read_tables(path: Path, *names: str) -> dict[str, Any]:
    """The tables of a TOML file that is handed in: {name: table, or list of tables}; {} for one that is not there.

    Raises:
        ConfigError: it cannot be read, or has something else.
    """
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"it cannot be read: {error}", where=str(path), fix="docs/capstones.md has an example"
        ) from None
    tables = {name: said.pop(name, {}) for name in names}
    if said or not all(isinstance(table, dict | list) for table in tables.values()):
        what = f"it has {', '.join(said) or 'a value'} where a table belongs"
        raise ConfigError(what, where=str(path), fix=f"[{'], ['.join(names)}]")
    return tables


def handed_in(folder: Path, capstone: Capstone) -> list[tuple[str, Path]]:
    """(learner, folder) of each hand-in: the folder itself, or those in it.

    Raises:
        DataError: there is none.
    """
    if (folder / capstone.file).is_file():
        return [(folder.resolve().name, folder)]
    found = sorted(path.parent for path in folder.glob(f"*/{capstone.file}"))
    if not found:
        raise DataError(
            f"there is no {capstone.file}", where=str(folder), fix="the folder that holds it, or all of them"
        )
    return [(path.name, path) for path in found]


def main(argv: Sequence[str] | None = None) -> int:
    """Grade, print, write.

    Raises:
        MinimegatronError: the command line, or nothing to grade.
    """
    first = Parser("minimegatron grade", add_help=False)
    first.add_argument("--capstone", required=True)
    capstone = load(first.parse_known_args(argv)[0].capstone)
    parser = Parser(
        "minimegatron grade", description=f"Grade capstone {capstone.name}. What is handed in is run with your rights."
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="HANDED_IN", help=f"folder with {capstone.file}, or a folder of such folders")
    add("--capstone", required=True, metavar="NN", help="which")
    add("--only", default="", metavar="NAME,...", help=f"of {', '.join(c.name for c in capstone.criteria)}")
    add("--seed", default="", help="of what is asked; by default a new secret one")
    add("--out", type=Path, metavar="CSV", help="points as a table, a row a learner")
    add("--json", type=Path, metavar="FILE", help="every result, and the seed")
    capstone.options(parser)
    options = parser.parse_args(argv)
    options.criteria = chosen(options.only, capstone)
    seed = options.seed or secrets.token_hex(8)
    graded: list[tuple[str, list[Result]]] = []
    for learner, folder in handed_in(options.folder, capstone):
        print(f"{learner}: capstone {capstone.name}")
        results: list[Result] = []

        def tell(result: Result, results: list[Result] = results) -> None:
            results.append(result)
            print(line(result), flush=True)

        try:
            capstone.run(folder, options, Random(f"{seed} {capstone.name}"), tell)
        except Missed as error:
            for criterion in options.criteria[len(results) :]:
                tell(missed(criterion, error))
        graded.append((learner, results))
        print(f"  {points(results)} of {of(options.criteria)} points")
    if options.out is not None:
        files.write(options.out, as_csv(graded, options.criteria))
    if options.json is not None:
        files.write(options.json, as_json(graded, capstone, seed))
    print(f"seed: {seed}")
    return 0


def chosen(only: str, capstone: Capstone) -> list[Criterion]:
    """The criteria that are asked for.

    Raises:
        ConfigError: there is no such.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    there = [criterion.name for criterion in capstone.criteria]
    for name in names:
        if name not in there:
            raise ConfigError(f"no criterion `{name}`", fix=did_you_mean(name, there) or f"of {', '.join(there)}")
    return [criterion for criterion in capstone.criteria if not names or criterion.name in names]


def points(results: Sequence[Result]) -> int:
    """Of all that is met."""
    return sum(result.points for result in results)


def of(criteria: Sequence[Criterion]) -> int:
    """Points of all."""
    return sum(criterion.points for criterion in criteria)


def line(result: Result) -> str:
    """A result, and what was wanted where it is not met."""
    wanted = "" if result.met else f"\n      wanted: {result.criterion.limit}"
    mark, criterion = "✔" if result.met else "✘", result.criterion
    return f"  {mark} {criterion.name:<16} {result.points:>2}/{criterion.points:<2}  {clean(result.told)}{wanted}"


def as_csv(graded: Sequence[tuple[str, Sequence[Result]]], criteria: Sequence[Criterion]) -> str:
    """A row a learner: points of each criterion, and of all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["learner", *(criterion.name for criterion in criteria), "points", "of"])
    for learner, results in graded:
        by_name = {result.criterion.name: result.points for result in results}
        each = [by_name.get(criterion.name, 0) for criterion in criteria]
        writer.writerow([clean(learner), *each, sum(each), of(criteria)])
    return text.getvalue()


def as_json(graded: Sequence[tuple[str, Sequence[Result]]], capstone: Capstone, seed: str) -> str:
    """Every result, with what was seen."""
    learners: dict[str, Any] = {
        learner: [{**dataclasses.asdict(r.criterion), "met": r.met, "told": r.told} for r in results]
        for learner, results in graded
    }
    run = {"capstone": capstone.name, "seed": seed, "versions": versions(), "machine": machine()}
    return json.dumps({**run, "learners": learners}, indent=1) + "\n"


def machine() -> dict[str, Any]:
    """Facts of the machine that has graded."""
    system = f"{platform.system()} {platform.machine()}"
    return {"system": system, "cores": usable_cores(), "load": os.getloadavg()[0], "gpus": nvidia_smi()}
