"""The course: a folder for each lab, with everything that its author edits.

    NN_name/__init__.py    LAB: the exercises in their order
    NN_name/lab.py         the one source of labs/NN_name.ipynb and solutions/NN_name.ipynb (`labkit/source`)
    NN_name/checks/        the exercises: inputs, the judge's own answer, what can go wrong, what to say then
    NN_name/given/         tools that only this lab uses; the folder is the package `course.labNN`
    NN_name/answers/       what tries the checks, a file an exercise: other right answers, and wrong ones with what is
                           said to them (`labkit/answers`)
    figures/               what labs draw, a module for each
    capstones/             projects that are run and held against published criteria; NN's given/ is
                           `course.capstoneNN`
    rehearsal.py           pipeline schedules run with sleep in the place of computation, for labs 03 and 12

A name that begins with a digit is for `importlib` and for relative imports: `course.01_process_groups` is what
`%lab 01_process_groups` loads.
"""

from __future__ import annotations

import gc
import sys
import types
from pathlib import Path
from typing import Any

# What a lab asks to be written is in these packages. `comm` is a tool that labs use, where it is not the subject.
CLOSED = (
    "minimegatron.layers", "minimegatron.parallel", "minimegatron.models", "minimegatron.training",
    "minimegatron.optim", "minimegatron.inference", "minimegatron.kernels", "minimegatron.checkpoint",
    "minimegatron.data", "minimegatron.posttraining", "minimegatron.viz", "minimegatron.commands", "course.figures",
    "course.rehearsal",
)  # fmt: skip


for _kind, _folders in (("lab", "[0-9][0-9]_*/given"), ("capstone", "capstones/[0-9][0-9]_*/given")):
    for _given in Path(__file__).parent.glob(_folders):
        _package = types.ModuleType(f"{__name__}.{_kind}{_given.parent.name[:2]}")
        _package.__path__ = [str(_given)]
        sys.modules[_package.__name__] = _package


def load_ipython_extension(shell: Any) -> None:
    """Called by IPython at `%load_ext course`: a notebook's magics, once a kernel, which find labs here.

    The kernel computes with one thread, as each of its ranks does. Where something else runs, small products on several
    threads wait for each other longer than they compute: a cell of 19 s took 9 minutes.
    """
    gc.disable()  # it would take a fifth of the time that torch and all the rest need, and find nothing
    try:
        import torch

        from labkit.magics import LabMagics
    finally:
        gc.freeze()  # nor is any of it ever garbage
        gc.set_threshold(50_000)  # and cells make little of it: a plan takes a third longer with Python's 700
        gc.enable()

    torch.set_num_threads(1)
    if LabMagics.__name__ not in shell.magics_manager.registry:
        shell.register_magics(LabMagics(shell, __name__))
