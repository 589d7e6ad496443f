"""A kernel in which no lab is open yet, as after a restart: the magics say which cell to run first.

`make lab`, and a wheel, put `ipython_startup.py` into the environment's `etc/ipython/startup`, from where every kernel
runs it.
`%load_ext course` replaces these magics by the real ones.
"""

from __future__ import annotations

from typing import Any

from labkit.plainly import NotebookError

FUNCTIONS = ("check", "hint", "progress", "guess", "guessed")
CELLS = ("exercise", "needs", "torchrun", "ranks")


def no_lab(*_: Any, **__: Any) -> None:
    """Refuse.

    Raises:
        NotebookError: always.
    """
    raise NotebookError("no lab is open in this kernel: run the notebook's first cell, then go on where you were")


def prepare(shell: Any) -> None:
    """Define the magics in a fresh kernel."""
    for name in FUNCTIONS:
        shell.user_ns.setdefault(name, no_lab)
    for name in CELLS:
        shell.register_magic_function(no_lab, "cell", name)
