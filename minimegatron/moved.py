"""Where modules went that once had another name: importing the old one says the new one.

A name that is imported somewhere else, in a learner's notebook or in a script, is not lost without a word:

    >>> import minimegatron.comm.workers
    ModuleNotFoundError: minimegatron.comm.workers is now minimegatron.launch.workers
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

MOVED = {
    **{
        f"minimegatron.{name}": f"minimegatron.config.{name}"
        for name in ("fields", "fits", "precision", "stages", "variants")
    },
    **{f"minimegatron.{name}": f"minimegatron.commands.{name}" for name in ("doctor", "jupyter", "pretrain_gpt")},
    **{
        f"minimegatron.comm.{name}": f"minimegatron.launch.{name}"
        for name in (
            "agent",
            "agreement",
            "blame",
            "clean",
            "drivers",
            "forkclient",
            "forkserver",
            "hardware",
            "launchers",
            "ledger",
            "patience",
            "procs",
            "rank",
            "watch",
            "workers",
        )
    },
    "minimegatron.comm.launch": "minimegatron.launch.torchrun (init, finish and report: minimegatron.launch.rank)",
    "minimegatron.lab": "labkit (in a notebook: %load_ext course)",
}


class Moved:
    """The last of Python's finders: it is asked for what no other has found."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Called by `import name`.

        Raises:
            ModuleNotFoundError: the module has another name now.
        """
        if name in MOVED:
            raise ModuleNotFoundError(f"{name} is now {MOVED[name]}", name=name)


def announce() -> None:
    """From now on an import of an old name says the new one."""
    if Moved not in sys.meta_path:
        sys.meta_path.append(Moved)
