"""The magics of the labs: `%lab`, `%%exercise`, `%%needs`, `%%torchrun`, `%%ranks`; `check`, `progress`, `guess`.

What a learner sees is the same text on every machine and at every run: paths are relative, ranks speak in order and
with one voice where they say the same, an exercise that is not done is a line and not a traceback, a failure is its
cause in one line with the line of the cell. A cell that fails does raise, so that "Run All" stops there, unless it is
meant to: `--expect-failure` prints the explanation and objects if nothing failed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import os
import shlex
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import MagicArgumentParser
from IPython.display import display

import minimegatron
from labkit import warm
from labkit.exercises import Lab, load_lab
from labkit.fresh import Nursery
from labkit.guesses import Guesses
from labkit.judge import judge
from labkit.record import course_digest
from labkit.verdict import Panel, Progress, Verdict
from labkit.workspace import Workspace
from minimegatron.errors import ConfigError, MinimegatronError
from minimegatron.launch import workers
from minimegatron.launch.torchrun import Run, launch, render

_STYLE = Path(minimegatron.__file__).resolve().parent / "viz" / "minimegatron.mplstyle"


class NotebookError(MinimegatronError):
    """Shown in a notebook as its text alone."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Our errors without a traceback: the learner's code is not in it."""
    try:
        yield
    except NotebookError:
        raise
    except MinimegatronError as error:
        raise NotebookError(error.what, where=error.where, fix=error.fix) from None
    except KeyboardInterrupt:
        raise NotebookError("interrupted; no rank is left running") from None


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _plainly():
            return function(*args, **kwargs)

    return wrapped


@magics_class
class LabMagics(Magics):
    """One lab in one kernel.

    Args:
        shell: IPython's.
        course: the package in which a lab's folder is found by its name.
    """

    def __init__(self, shell: Any, course: str) -> None:
        super().__init__(shell)
        self._package = course
        self._names: dict[str, Any] = shell.user_ns
        self._lab: Lab | None = None
        self._workspace: Workspace | None = None
        self._guesses: Guesses | None = None
        self._course = ""
        self._nursery = Nursery()
        self._torchrun, self._ranks = _torchrun_options(), _ranks_options()

    @property
    def lab_and_work(self) -> tuple[Lab, Workspace]:
        if self._lab is None or self._workspace is None:
            raise ConfigError("no lab is open", fix="run the notebook's first cell: %lab NAME")
        return self._lab, self._workspace

    @line_magic
    @_plain
    def lab(self, line: str) -> None:
        """`%lab NAME [MODULE]`: open the lab NAME, whose exercises MODULE declares (default: NAME in the course)."""
        name, _, module = line.strip().partition(" ")
        course = module.strip() or f"{self._package}.{name}"
        self._lab, self._course = load_lab(course), course
        self._workspace = Workspace(name, Path.cwd(), course_digest(course))
        sys.path[:] = [entry for entry in sys.path if Path(entry).parent.name != ".work"]
        sys.path.insert(0, str(self._workspace.folder))
        self._guesses = Guesses(self._workspace.folder)
        self._names.update(check=self.check, progress=self.progress, guess=self.guess, guessed=self.guessed)
        self._nursery.warm_up()
        with contextlib.suppress(ImportError):
            import matplotlib.style

            matplotlib.style.use(_STYLE)
        display(self._panel())

    def _panel(self) -> Panel:
        lab, work = self.lab_and_work
        known = {name: work.remembered(name) for name in lab.exercises}
        points = sum(verdict.points for verdict in known.values() if verdict)
        open_ = (name for name, verdict in known.items() if verdict is None or verdict.state != "passed")
        return Panel(lab.name, points, lab.points, next(open_, ""), work.record.trouble)

    @cell_magic
    @_plain
    def exercise(self, line: str, cell: str) -> None:
        """`%%exercise NAME`: define the cell's functions here, and save them where ranks and checks import them."""
        lab, work = self.lab_and_work
        name = lab[line.strip()].name
        module = work.define(work.save_exercise(name, line.strip(), cell))
        self._names.update({key: value for key, value in vars(module).items() if not key.startswith("_")})

    @_plain
    def check(self, name: str) -> Verdict | int:
        """Check one exercise, on inputs you see and on others, drawn anew each day."""
        verdict = self._check(name)
        if "NBGRADER_EXECUTION" in os.environ:  # nbgrader takes a number as points, and anything else as full marks
            print(repr(dataclasses.replace(verdict, attempt=0)))
            return verdict.points
        return verdict

    def _check(self, name: str) -> Verdict:
        lab, work = self.lab_and_work
        today = f"{work.root}/{lab.name}/{datetime.date.today()}"  # the same text gets the same marks
        seed = hashlib.sha256(today.encode()).hexdigest()
        verdict = judge(self._nursery, self._course, lab[name].name, work.sources(), seed)
        return work.remember(verdict)

    @_plain
    def progress(self) -> Progress:
        """All exercises of this lab and the sum."""
        lab, _ = self.lab_and_work
        return Progress(lab.name, [self._verdict(name) for name in lab.exercises])

    def _verdict(self, name: str) -> Verdict:
        return self.lab_and_work[1].remembered(name) or self._check(name)

    @_plain
    def guess(self, name: str, value: Any, question: str = "") -> None:
        """Keep a number guessed from the gut, until `guessed` shows it beside the measured one."""
        print(self._kept_guesses.guess(name, value))

    @_plain
    def guessed(self, name: str, measured: Any, what: str = "") -> None:
        """Show what was measured beside the guess of this name."""
        print(self._kept_guesses.guessed(name, measured, what))

    @property
    def _kept_guesses(self) -> Guesses:
        _ = self.lab_and_work
        assert self._guesses is not None, "a lab opens its guesses"
        return self._guesses

    def _waits(self, needs: str) -> bool:
        """Say which of the exercises are not passed yet, and whether there are any."""
        missing = [verdict for name in filter(None, needs.split(",")) if not (verdict := self._verdict(name)).passed]
        for verdict in missing:
            wait = f"this cell waits for exercise {verdict.exercise}"
            if verdict.state == "todo":
                print(f"○ {wait}")
            else:
                points = f"{verdict.points} of {verdict.of} points"
                print(f'✘ {wait}, which is not right yet ({points}): see check("{verdict.exercise}")')
        return bool(missing)

    @cell_magic
    def needs(self, line: str, cell: str) -> None:
        """`%%needs NAME ...`: run the cell here, in the kernel, once these exercises have passed.

        An expression at its end is shown, as in any cell.
        """
        with _plainly():
            waits = self._waits(",".join(line.split()))
        if waits:
            return
        most = ast.parse(cell, "<cell>")
        last = most.body.pop() if most.body and isinstance(most.body[-1], ast.Expr) else None
        exec(compile(most, "<cell>", "exec"), self._names)
        if last:
            exec(compile(ast.Interactive([last]), "<cell>", "single"), self._names)

    @cell_magic
    @_plain
    def torchrun(self, line: str, cell: str) -> None:
        """`%%torchrun -n N`: the cell as a script under torchrun, its ranks on CPUs.

        With `--gpus LEAST` it runs on all GPUs of this machine, or on as many as `-n` says; with fewer than that it
        prints a sentence and does nothing.
        """
        options = self._torchrun.parse_args(shlex.split(line))
        nproc = _with_gpus(options.gpus, options.nproc) if options.gpus else options.nproc or 2
        if nproc is None or self._waits(options.needs):
            self._keep(options, None)
            return
        _, work = self.lab_and_work
        script = work.save_script(options.name, f"%%torchrun {line}", cell)
        compile(script.read_text(), script.name, "exec")  # a syntax error is shown once, here, and not by every rank
        with contextlib.chdir(work.root):
            rundir = work.folder / "runs" / options.name
            gpus = bool(options.gpus)
            run = launch(work.relative(script), nproc, rundir, options.timeout, options.args, gpus=gpus)
        self._keep(options, run)
        print(f"$ {run.cmd}\n{run.where()}")
        if text := render(run.stdout):
            print(text)
        self._judge_run("" if run.returncode == 0 else run.explain(script.read_text()), options.expect_failure)

    @cell_magic
    @_plain
    def ranks(self, line: str, cell: str) -> None:
        """`%%ranks N`: the cell on N warm ranks; it knows `rank`, `world` and `report(value)`."""
        options = self._ranks.parse_args(shlex.split(line))
        if self._waits(options.needs):
            self._keep(options, None)
            return
        _, work = self.lab_and_work
        script = work.save_script(options.name, f"%%ranks {line}", cell)
        compile(script.read_text(), script.name, "exec")
        failure, results = "", workers.Results()
        try:
            results = workers.shared_pool(options.nproc).run(warm.run_cell, str(script), timeout=options.timeout)
            if text := render(results.stdout):
                print(text)
        except MinimegatronError as error:
            failure = warm.explain(error, script)
        self._keep(options, list(results))
        self._judge_run(failure, options.expect_failure)

    def _keep(self, options: Any, value: Run | list[Any] | None) -> None:
        if options.out:
            self._names[options.out] = value

    def _judge_run(self, failure: str, expected: bool) -> None:
        if expected and not failure:
            raise NotebookError("this cell was expected to fail, and did not")
        if failure and not expected:
            raise NotebookError(failure)
        if failure:
            print(failure)


def _with_gpus(least: int, nproc: int | None) -> int | None:
    """How many ranks get a GPU each: `nproc`, else all there are. None, and a sentence, where GPUs are too few."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = max(least, nproc or 1)
    if there < wanted:
        print(f"○ this cell needs {wanted} GPU{'s' * (wanted > 1)} and finds {there} here; the lab goes on without it")
        return None
    return nproc or there


def _count(text: str) -> int:
    """A number of ranks or GPUs."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def _torchrun_options() -> MagicArgumentParser:
    parser = _common("%%torchrun")
    parser.add_argument("-n", "--nproc", type=_count, help="number of ranks; default 2, with --gpus one for each GPU")
    gpus = "give each rank a GPU of its own; needs at least LEAST of them (default 1)"
    parser.add_argument("--gpus", nargs="?", type=_count, const=1, metavar="LEAST", help=gpus)
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    return parser


def _ranks_options() -> MagicArgumentParser:
    parser = _common("%%ranks")
    parser.add_argument("nproc", type=_count, help="number of ranks")
    return parser


def _common(name: str) -> MagicArgumentParser:
    parser = MagicArgumentParser(name, add_help=False)
    parser.add_argument("--needs", default="", help="exercises, with commas between, that must have passed")
    parser.add_argument("--name", default="cell", help="name of the script that is kept")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds from the moment all ranks have started")
    out = "variable that gets the Run (%%ranks: what was reported, by rank); None where the cell does not run"
    parser.add_argument("--out", default="", help=out)
    parser.add_argument("--expect-failure", action="store_true", help="print how it failed instead of raising")
    return parser
