"""The magics of the labs: `%lab`, `%%exercise`, `%%needs`, `%%torchrun`, `%%ranks`; `check`, `progress`, `guess`.

A learner sees the same text on every machine and in every run: paths are relative, output of ranks is in rank order and
joined if it is equal, an exercise that is not done is a line and not a traceback, a failure is its cause in one line
with the line of the cell. A cell that fails does raise, so that "Run All" stops there, unless it is meant to:
`--expect-failure` prints the explanation and objects if nothing failed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import datetime
import hashlib
import io
import os
import re
import shlex
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import MagicArgumentParser
from IPython.display import DisplayHandle, display

import minimegatron
from labkit import warm
from labkit.exercises import Lab, find_lab, load_lab
from labkit.fresh import Nursery
from labkit.guesses import Guesses, question_of, unit_of
from labkit.judge import judge
from labkit.made import Made
from labkit.notes import translated_sentences
from labkit.plainly import NotebookError, compiled, frames_of_the_cell, in_short, plain, plainly
from labkit.ranks import pool as workers
from labkit.ranks.torchrun import Run, launch, render
from labkit.record import course_digest
from labkit.said import language, say
from labkit.suspects import mistakes_of
from labkit.verdict import Panel, Progress, Verdict
from labkit.workspace import Workspace
from minimegatron.commands import prose
from minimegatron.errors import ConfigError, MinimegatronError

_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_STYLE = Path(minimegatron.__file__).resolve().parent / "viz" / "minimegatron.mplstyle"


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
        self._shell: Any = shell
        self._names: dict[str, Any] = shell.user_ns
        self._lab: Lab | None = None
        self._workspace: Workspace | None = None
        self._guesses: Guesses | None = None
        self._course = ""
        self._nursery = Nursery()
        self._torchrun, self._ranks = torchrun_options(), ranks_options()
        self._made = Made(self._names)
        self._note, self._last_shown = "", ""
        self._handle: DisplayHandle | None = None
        self._names.update(check=self.check, hint=self.hint, progress=self.progress)
        self._names.update(guess=self.guess, guessed=self.guessed)
        shell.set_custom_exc((NameError, ModuleNotFoundError), self._made.show)

    @property
    def lab_and_work(self) -> tuple[Lab, Workspace]:
        if self._lab is None or self._workspace is None:
            raise ConfigError("no lab is open", fix="run the notebook's first cell: %lab NAME")
        return self._lab, self._workspace

    @line_magic
    @plain
    def lab(self, line: str) -> None:
        """`%lab NAME [MODULE]`: open the lab NAME, whose exercises MODULE declares (default: NAME in the course).

        `%lab 1` and `%lab 01` find the lab of this number in the course. Exercises that are saved already are loaded.
        """
        name, _, module = line.strip().partition(" ")
        if not module:
            name = find_lab(self._package, name)
        course = module.strip() or f"{self._package}.{name}"
        self._lab, self._course = load_lab(course), course
        self._workspace = Workspace(name, Path.cwd(), course_digest(course))
        self._workspace.enter()
        self._guesses = Guesses(self._workspace.folder)
        self._made.open(_source_of(course))
        self._nursery.warm_up()
        with contextlib.suppress(ImportError):
            import matplotlib.style

            matplotlib.style.use(_STYLE)
        self._shell.extension_manager.loaded.discard(self._package)  # the first cell may be run again without a word
        self._load_saved()
        self._last_shown = repr(self._panel())
        self._handle = display(self._panel(), display_id=True)

    def _load_saved(self) -> None:
        """Define what an earlier kernel has saved; remarks about it go into the panel."""
        lab, work = self.lab_and_work
        loaded, notes = [], []
        for name in filter(work.sources().__contains__, lab.exercises):
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    self._define(work.define(work.saved(name)))
            except (Exception, SystemExit) as error:
                notes.append(
                    f"✘ your exercise {name} cannot be loaded: {in_short(error, work.saved(name))}; mend its cell"
                )
            else:
                loaded += [name] if work.begun(name) else []
        ready = [say("loaded", names=", ".join(loaded))] if loaded else []
        self._note = "\n".join([*ready, *notes])

    def _panel(self) -> Panel:
        lab, work = self.lab_and_work
        known = {name: work.remembered(name) for name in lab.exercises}
        points = sum(verdict.points for verdict in known.values() if verdict)
        open_ = (name for name, verdict in known.items() if verdict is None or not verdict.passed)
        undone = [
            say("below", name=name, names=", ".join(below))
            for name in lab.exercises
            if (below := work.changed_below(name))
        ]
        note = "\n".join(filter(None, [self._note, *undone, work.record.trouble]))
        return Panel(lab.name, points, lab.points, next(open_, ""), note)

    def _move_panel(self) -> None:
        """Update the panel of the first cell; a terminal could only print it again."""
        panel = self._panel()
        if self._handle and repr(panel) != self._last_shown and hasattr(self._shell, "kernel"):
            self._handle.update(panel)
            self._last_shown = repr(panel)

    @cell_magic
    @plain
    def exercise(self, line: str, cell: str) -> None:
        """`%%exercise NAME`: define the cell's functions here, and save them where ranks and checks import them."""
        lab, work = self.lab_and_work
        name = lab[line.strip()].name
        path = work.save_exercise(name, line.strip(), cell)
        compiled(path.read_text(), path.read_text(), str(path))
        with frames_of_the_cell(self._shell, str(path)):
            self._define(work.define(path))

    def _define(self, module: types.ModuleType) -> None:
        self._names.update({key: value for key, value in vars(module).items() if not key.startswith("_")})

    @plain
    def check(self, name: str) -> Verdict | int:
        """Check one exercise, on inputs you see and on others, drawn anew each day."""
        verdict = self._check(name)
        if "NBGRADER_EXECUTION" in os.environ:  # nbgrader takes a number as points, and anything else as full marks
            print(repr(dataclasses.replace(verdict, attempt=0)))
            return verdict.points
        asked = self.lab_and_work[0][name]
        whats, mistakes = [case.what for case in asked.cases], mistakes_of(self._course, asked)
        said = self._lines("mistakes", name, mistakes)
        verdict = verdict.with_cases(self._lines("cases", name, whats))
        return verdict.with_mistake(dict(zip(mistakes, said, strict=True))).with_sentences(
            translated_sentences(self._translated, _source_of(self._course).parent)
        )

    def _check(self, name: str) -> Verdict:
        lab, work = self.lab_and_work
        today = f"{work.root}/{lab.name}/{datetime.date.today()}"  # the same text gets the same marks
        seed = hashlib.sha256(today.encode()).hexdigest()
        verdict = judge(self._nursery, self._course, lab[name].name, work.sources(), seed)
        if verdict.idea:
            verdict = dataclasses.replace(verdict, idea=self._said(prose.Which("idea", name), lab[name].idea))
        verdict = work.remember(verdict)
        self._move_panel()
        return verdict

    @plain
    def hint(self, name: str) -> None:
        """Print how one exercise can be solved."""
        print(self._said(prose.Which("hint", name), self.lab_and_work[0][name].hint))

    def _said(self, which: prose.Which, english: str) -> str:
        """An idea, a hint, a guess ... of this lab in the language of the labs, where it is translated."""
        return prose.in_language(self._translated, which, english)

    def _lines(self, kind: str, name: str, english: Sequence[str]) -> list[str]:
        """The same, of a list of an exercise: its cases or mistakes."""
        return prose.lines_in_language(self._translated, prose.Which(kind, name), english)

    @property
    def _translated(self) -> dict[prose.Which, prose.Translation]:
        return prose.read(_source_of(self._course).with_name(f"{language()}.md"))

    @plain
    def progress(self) -> Progress:
        """All exercises of this lab and the sum."""
        lab, _ = self.lab_and_work
        return Progress(lab.name, [self._verdict(name) for name in lab.exercises])

    def _verdict(self, name: str) -> Verdict:
        return self.lab_and_work[1].remembered(name) or self._check(name)

    @plain
    def guess(self, name: str, value: Any, question: str = "") -> None:
        """Keep a guess until `guessed` shows it beside the measured number."""
        guesses = self._kept_guesses  # first: without a lab there is no question either
        said = self._said(question_of(name), question)
        print(*[said] * (said != question), guesses.guess(name, value), sep="\n")

    @plain
    def guessed(self, name: str, measured: Any, what: str = "") -> None:
        """Show the measured number beside the guess of this name."""
        guesses = self._kept_guesses
        print(guesses.guessed(name, measured, self._said(unit_of(what), what)))

    @property
    def _kept_guesses(self) -> Guesses:
        _ = self.lab_and_work
        assert self._guesses is not None, "a lab opens its guesses"
        return self._guesses

    def _waits(self, needs: str) -> bool:
        """Print which of the exercises are not passed yet; returns whether there are any."""
        missing = [verdict for name in filter(None, needs.split(",")) if not (verdict := self._verdict(name)).passed]
        for verdict in missing:
            waits = say("waits", exercise=verdict.exercise)
            if verdict.state == "todo":
                print(f"○ {waits}")
            else:
                points = say("points", points=verdict.points, of=verdict.of)
                print(f"✘ {say('waits-wrong', waits=waits, points=points, exercise=verdict.exercise)}")
        return bool(missing)

    @cell_magic
    def needs(self, line: str, cell: str) -> None:
        """`%%needs NAME ...`: run the cell here, in the kernel, once these exercises have passed.

        An expression at its end is shown, as in any cell.
        """
        with plainly():
            waits = self._waits(",".join(line.split()))
        if waits:
            return
        text = f"# %%needs {line}\n{cell}"
        name = self._shell.compile.cache(text, self._shell.execution_count)  # its lines, for whoever shows a traceback
        most = compiled(text, text, name, flags=ast.PyCF_ONLY_AST)
        last = most.body.pop() if most.body and isinstance(most.body[-1], ast.Expr) else None
        parts = [(most, "exec"), *([(ast.Interactive([last]), "single")] if last else [])]
        codes = [compiled(tree, text, name, mode) for tree, mode in parts]
        with frames_of_the_cell(self._shell, name):
            for code in codes:
                exec(code, self._names)  # noqa: S102  the learner's own code, in a process made for it

    @cell_magic
    @plain
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
        text = script.read_text()
        compiled(text, text, script.name)  # a syntax error is shown once, here, and not by every rank
        with contextlib.chdir(work.root):
            rundir = work.folder / "runs" / options.name
            gpus = bool(options.gpus)
            run = launch(work.relative(script), nproc, rundir, options.timeout, options.args, gpus=gpus)
        self._keep(options, run)
        print(f"$ {run.cmd}\n{run.where()}")
        if said := render(run.stdout):
            print(said)
        self._judge_run("" if run.returncode == 0 else run.explain(text), options)

    @cell_magic
    @plain
    def ranks(self, line: str, cell: str) -> None:
        """`%%ranks N`: the cell on N warm ranks; it knows `rank`, `world` and `report(value)`."""
        options = self._ranks.parse_args(shlex.split(line))
        if self._waits(options.needs):
            self._keep(options, None)
            return
        _, work = self.lab_and_work
        script = work.save_script(options.name, f"%%ranks {line}", cell)
        compiled(script.read_text(), script.read_text(), script.name)
        failure, results = "", workers.Results()
        try:
            results = workers.shared_pool(options.nproc).run(warm.run_cell, str(script), timeout=options.timeout)
            if text := render(results.stdout):
                print(text)
        except MinimegatronError as error:
            failure = warm.explain(error, script)
        self._keep(options, list(results))
        self._judge_run(failure, options)

    def _keep(self, options: Any, value: Run | list[Any] | None) -> None:
        if options.out:
            self._names[options.out] = value
            self._made.failed.discard(options.out)

    def _judge_run(self, failure: str, options: Any) -> None:
        if options.expect_failure and not failure:
            raise NotebookError("this cell was expected to fail, and did not")
        if failure and not options.expect_failure:
            if options.out:  # what a failed run has left must not be taken for a result
                self._names.pop(options.out, None)
                self._made.failed.add(options.out)
            missing = _NO_MODULE.search(failure)
            raise NotebookError((missing and self._made.missing(missing[1])) or failure)
        if failure:
            print(failure)


def _source_of(course: str) -> Path:
    """The lab.py beside the module that declares a lab."""
    return Path(str(sys.modules[course].__file__)).with_name("lab.py")


def _with_gpus(least: int, nproc: int | None) -> int | None:
    """The number of ranks, one a GPU: `nproc`, else all GPUs. Prints a sentence and returns None if there are too
    few."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = max(least, nproc or 1)
    if there < wanted:
        print(f"○ this cell needs {wanted} GPU{'s' * (wanted > 1)} and finds {there} here; the lab goes on without it")
        return None
    return nproc or there


# ------------------------------------------------------------------------------ options of a cell's first line


def torchrun_options() -> MagicArgumentParser:
    """`-n`, `--gpus`, the common options, and the script's own arguments after `--`."""
    parser = _common("%%torchrun")
    parser.add_argument("-n", "--nproc", type=_count, help="number of ranks; default 2, with --gpus one for each GPU")
    gpus = "give each rank a GPU of its own; needs at least LEAST of them (default 1)"
    parser.add_argument("--gpus", nargs="?", type=_count, const=1, metavar="LEAST", help=gpus)
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    return parser


def ranks_options() -> MagicArgumentParser:
    """The number of ranks, and the common options."""
    parser = _common("%%ranks")
    parser.add_argument("nproc", type=_count, help="number of ranks")
    return parser


def _common(name: str) -> MagicArgumentParser:
    parser = MagicArgumentParser(name, add_help=False)
    parser.add_argument("--needs", default="", help="exercises, with commas between, that must have passed")
    parser.add_argument("--name", default="cell", help="name of the script that is kept")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds from the moment all ranks have started")
    out = "variable that gets the Run (%%ranks: what was reported, by rank); None where the cell waits"
    parser.add_argument("--out", default="", help=out)
    parser.add_argument("--expect-failure", action="store_true", help="print how it failed instead of raising")
    return parser


def _count(text: str) -> int:
    """A number of ranks or GPUs."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)
