"""Parts of a benchmark, each in a process of its own: what one does wrong costs its own figures and nobody else's.

The problem in a sentence: on the day that kernels meet a GPU for the first time one of them may write where it must
not, and CUDA then refuses whatever else that process wants: one mistake would cost every figure still to come.

A part is forked from a process that has imported everything and has never touched a GPU: a second for a context of its
own, not ten for a new Python. It yields as it goes, and what it has yielded is kept:

| yielded      | is                                                          |
|--------------|-------------------------------------------------------------|
| a `Row`      | a measured line                                             |
| a dict       | facts for later parts: the device's name, the micro-batch   |
| a str        | a remark, printed                                           |

A part ends well, or raises, or is killed, or takes too long: its stack is then on stderr, and the next part begins.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from minimegatron.launch import procs

END_SECONDS = 10.0  # for a process that was told to end
ANSWER_SECONDS = 60.0  # for the driver's first answer


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured line: what, how long, how much a second, and what share of the machine that is.

    Attributes:
        against: name of a contender -> how many times longer it takes (FP8, graphs: how many times longer than bf16).
    """

    what: str
    milliseconds: float
    rate: float
    unit: str
    share: float | None = None
    against: dict[str, float] = dataclasses.field(default_factory=dict)

    def figure(self) -> str:
        """The measured part as text."""
        words = [f"{self.milliseconds:.3f} ms", f"{self.rate:.1f} {self.unit}"]
        words += [] if self.share is None else [f"{100 * self.share:.1f} %"]
        words += [f"{ratio:.2f} times faster than {name}" for name, ratio in self.against.items()]
        return ", ".join(words)


@dataclasses.dataclass
class Found:
    """What the parts so far have found.

    Attributes:
        rows: by what they say.
        facts: of the machine, and of earlier parts.
        failed: part -> why.
        left_out: part -> why.
    """

    rows: dict[str, Row] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)

    def share(self, rate: float, of: str) -> float | None:
        """Of another row's rate; None where that was not measured."""
        return rate / self.rows[of].rate if of in self.rows else None


Yielded = Row | dict[str, Any] | str


@dataclasses.dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        run: yields rows, facts and remarks; is given what was found before it.
        needs: seconds; with less than that left it is not begun.
        limit: seconds after which it is ended.
        unless: why it cannot be run, from what was found; "" when it can.
    """

    name: str
    run: Callable[[Found], Iterator[Yielded]]
    needs: float = 10.0
    limit: float = 90.0
    unless: Callable[[Found], str] = lambda found: ""


def elsewhere(question: Callable[[], bool]) -> bool:
    """What a forked process answers: one that has asked CUDA anything cannot be forked any more."""
    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(int(question())))
    process.start()
    process.join(ANSWER_SECONDS)
    if process.is_alive():
        process.kill()
        process.join(END_SECONDS)
    return process.exitcode == 1


def play(part: Part, found: Found, limit: float, say: Callable[[str], None], keep: Callable[[], None]) -> None:
    """Run one part to its end, and put what it yields into `found`.

    Args:
        limit: seconds.
        say: prints a line.
        keep: called after every row.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(part, found, limit, theirs))
    process.start()
    theirs.close()
    deadline = time.monotonic() + limit
    failure = None
    try:
        while failure is None:
            if not ours.poll(max(0.0, deadline - time.monotonic())):
                failure = f"took longer than {limit:.0f} s"
                break
            message = ours.recv()
            if isinstance(message, Row):
                found.rows[message.what] = message
                say(f"{message.what:<40} {message.figure()}")
                keep()
            elif isinstance(message, dict):
                found.facts.update(message)
            elif isinstance(message, str):
                say(f"  {message}")
            else:
                (failure,) = message
    except EOFError:
        process.join(END_SECONDS)
        failure = procs.how_it_ended(process.exitcode or 0)
    finally:
        ours.close()
        process.join(END_SECONDS if failure == "" else 0)
        if process.is_alive():
            process.kill()
            process.join(END_SECONDS)
    if failure:
        found.failed[part.name] = failure
        say(f"{part.name}: FAILED, {failure}")
        keep()


def play_all(
    parts: list[Part],
    found: Found,
    seconds_left: Callable[[], float],
    say: Callable[[str], None],
    keep: Callable[[], None],
) -> None:
    """All parts, as long as there is time."""
    for part in parts:
        left = seconds_left()
        if reason := part.unless(found):
            found.left_out[part.name] = reason
        elif left < part.needs:
            found.left_out[part.name] = f"{max(0, left):.0f} s are left, it takes about {part.needs:.0f}"
        else:
            say(f"-- {part.name}")
            play(part, found, part.limit, say, keep)
            continue
        say(f"{part.name}: left out, {found.left_out[part.name]}")


def _child(part: Part, found: Found, limit: float, out: Connection) -> None:
    procs.die_with_parent(signal.SIGKILL)
    faulthandler.enable(2)
    faulthandler.dump_traceback_later(max(0.5, limit - 1.0), file=2)
    failure = ""
    try:
        for each in part.run(found):
            out.send(each)
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    out.send((failure,))
    out.close()
