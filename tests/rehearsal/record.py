"""What happened on the simulated device: launches, host waits, messages and choices, by phase and by place.

A *launch* is one operator that would start a kernel (views and empty tensors start none). A *host wait* is a moment at
which Python stands still until the GPU has done everything that it was told before; its place is the innermost line of
the project, so that whoever reads the record knows what to mend. A *message* is one call of a collective or of a send
or receive. A *choice* is what a library would decide by itself, such as which attention kernel runs.

    with RECORD.phase("step"):      # names what follows, also on the threads of a backward pass
        trainer._step(...)
    RECORD.waits["step", "item", "minimegatron/training/step.py:245 train_step"]
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)
ROOT = str(Path(__file__).parents[2])
OUTSIDE = "(outside the project)"


COMM = f"{ROOT}/minimegatron/comm/"


def place(beyond: str | None = None) -> str:
    """The innermost line of the project (or of a script) that is running: "minimegatron/optim/clip.py:85 norm".

    Lines of this package, of torch and of the standard library are passed over. On a thread of the autograd engine that
    is not inside a `torch.autograd.Function` there is none.

    Args:
        beyond: a folder whose lines are passed over as well, as long as there is another one.
    """
    frame, inside = sys._getframe(1), OUTSIDE
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((HERE, "<frozen")) and "/site-packages/" not in file and "/lib/python3" not in file:
            line = f"{file.removeprefix(ROOT + '/')}:{frame.f_lineno} {frame.f_code.co_name}"
            if beyond is None or not file.startswith(beyond):
                return line
            inside = line if inside == OUTSIDE else inside
        frame = frame.f_back
    return inside


@dataclasses.dataclass
class Record:
    """Counters, each keyed by the phase first.

    Attributes:
        launches: (phase, operator) -> launches.
        waits: (phase, kind, place) -> times that the host waited.
        messages: (phase, operation, bytes, place) -> calls; the place is who asked `minimegatron.comm` for it.
        choices: (phase, what) -> times.
    """

    launches: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    waits: Counter[tuple[str, str, str]] = dataclasses.field(default_factory=Counter)
    messages: Counter[tuple[str, str, int, str]] = dataclasses.field(default_factory=Counter)
    choices: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    _phase: str = ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside belongs to this phase."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def launch(self, operator: str, times: int = 1) -> None:
        self.launches[self._phase, operator] += times

    def wait(self, kind: str) -> None:
        self.waits[self._phase, kind, place()] += 1

    def message(self, operation: str, nbytes: int) -> None:
        self.messages[self._phase, operation, nbytes, place(COMM)] += 1

    def choice(self, what: str) -> None:
        self.choices[self._phase, what] += 1

    def clear(self) -> None:
        """Forget everything."""
        for counter in self._counters().values():
            counter.clear()

    def count(self, what: str, phase: str | None = None, containing: str = "") -> int:
        """How many launches, waits, messages or choices there were.

        Args:
            what: "launches", "waits", "messages" or "choices".
            phase: only those of this phase.
            containing: only those whose kind, operator or place contains this text.
        """
        return sum(
            times
            for key, times in self._counters()[what].items()
            if phase in (None, key[0]) and containing in " ".join(map(str, key[1:]))
        )

    def table(self, what: str, phase: str | None = None) -> str:
        """Lines "times  kind  place", the most frequent first."""
        rows = [(n, key) for key, n in self._counters()[what].items() if phase in (None, key[0])]
        return "\n".join(f"{n:6}  {'  '.join(map(str, key[1:]))}" for n, key in sorted(rows, key=lambda row: -row[0]))

    def to_json(self) -> dict[str, list[list[Any]]]:
        return {name: [[*key, n] for key, n in counter.items()] for name, counter in self._counters().items()}

    @classmethod
    def from_json(cls, data: dict[str, list[list[Any]]]) -> Record:
        return cls(**{name: Counter({tuple(row[:-1]): row[-1] for row in rows}) for name, rows in data.items()})

    def _counters(self) -> dict[str, Counter[Any]]:
        return {name: getattr(self, name) for name in ("launches", "waits", "messages", "choices")}


RECORD = Record()
