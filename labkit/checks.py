"""Ready-made judges of evidence, for `Exercise.accept` and `Case.accept`.

Each maker builds a function of an `Answer` that returns None, or a sentence about what is wrong. `labkit.compare` does
the same for the values themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.evidence import Evidence
from labkit.exercises import Accept, Answer


def sends(
    *names: str, times: Callable[[Any], int] | int | None = None,
    at_most: tuple[str, Callable[[Any], float]] | None = None, to_the_next: bool = False,
) -> Accept:  # fmt: skip
    """Judge: every communication is one of these, and no rank makes more than is asked for.

    sends("all_reduce", times=1, at_most=("dx", lambda ranks: ranks[0]["x"].nbytes))

    Args:
        names: as in torch.distributed; none: no communication at all.
        times: how many each rank makes; a number, or a function of the case's inputs. Receives do not count.
        at_most: a bound in words, and its bytes as a function of the inputs. Receives do not count.
        to_the_next: sends go to the next rank and to no other, as in a ring.
    """

    def accept(answer: Answer) -> str | None:
        for rank, one in enumerate(answer.evidence):
            if other := sorted({call.name for call in one.calls} - set(names)):
                return f"it calls {', '.join(other)}; allowed here: {', '.join(names) or 'no communication'}"
            after = (rank + 1) % len(answer.evidence)
            if to_the_next and (others := sorted({c.peer for c in one.calls if c.name == "send"} - {after})):
                return f"rank {rank} sends to rank {others[0]}; in this ring it sends to the next rank only, {after}"
            mine = [call for call in one.calls if call.name != "recv"]
            want = times(answer.inputs) if callable(times) else times
            if want is not None and len(mine) != want:
                said = " or ".join(name for name in names if name != "recv")
                return f"rank {rank} calls {said} {len(mine)} times, expected {want}"
            if at_most and (moved := sum(call.nbytes for call in mine)) > (bound := at_most[1](answer.inputs)):
                return f"rank {rank} moves {moved} bytes; {at_most[0]} is {int(bound)}"
        return None

    return accept


def at_most(what: str, nbytes: Callable[[Any], float], *names: str) -> Accept:
    """Judge: no rank moves more than `nbytes(inputs)` with these communications; `what` names the bound: "2
    (N-1)/N n"."""

    def accept(answer: Answer) -> str | None:
        bound = nbytes(answer.inputs)
        for rank, one in enumerate(answer.evidence):
            if one.nbytes(*names) > bound:
                return f"rank {rank} moves {one.nbytes(*names)} bytes; {what} is {int(bound)}"
        return None

    return accept


def overlaps(name: str, multiply_adds: Callable[[Any], float], what: str = "") -> Accept:
    """Judge: while a communication `name` is under way, each rank computes matrix products of this many multiply-adds.

    `what` is the tensor that is sent, in words for the learner: "the block"; default `name`.

    It is under way from its start to the first wait for it; one that is not waited for does not count.
    """

    def accept(answer: Answer) -> str | None:
        bound = multiply_adds(answer.inputs)
        for rank, one in enumerate(answer.evidence):
            done = _during(one, name)
            if done < bound:
                return f"rank {rank}: {done} of {int(bound)} multiply-adds are done while {what or name} travels"
        return None

    return accept


def _during(one: Evidence, name: str) -> int:
    """Multiply-adds of all products between a start of `name` and the first wait for it."""
    times = [(call.at, call.waited_at) for call in one.calls if call.name == name and call.waited is not None]
    products = [(at, much) for at, (what, much) in zip(one.places, one.order, strict=True) if what == "matmul"]
    return sum(much for at, much in products if any(start < at <= end for start, end in times))


def every_wait_follows(answer: Answer) -> str | None:
    """Judge: every communication that was started is waited for; otherwise it might never arrive."""
    for rank, one in enumerate(answer.evidence):
        if call := next((call for call in one.calls if call.waited is None), None):
            return f"rank {rank} never waits for its {call.name}"
    return None


def untouched(answer: Answer) -> str | None:
    """Judge: what is sent (not in place) still holds the same numbers at the wait for it."""
    for rank, one in enumerate(answer.evidence):
        if call := next((call for call in one.calls if call.overwritten), None):
            return f"rank {rank} writes into what its {call.name} still sends: first wait for it, or use other memory"
    return None


def alone(answer: Answer) -> bool:
    """Whether the learner's function ran in one process, without ranks."""
    return not isinstance(answer.inputs, list)


def peak_at_most(what: str, nbytes: Callable[[Any], float]) -> Accept:
    """Judge: no process holds more than `nbytes(inputs)` of its own tensors at a time; `what` names the bound."""

    def accept(answer: Answer) -> str | None:
        bound = nbytes(answer.inputs)
        for rank, one in enumerate(answer.evidence):
            if one.peak > bound:
                who = "it" if alone(answer) else f"rank {rank}"
                return f"{who} holds {one.peak} bytes at once; {what} is {int(bound)}"
        return None

    return accept


def keeps_alive(what: str, nbytes: Callable[[Any], float]) -> Accept:
    """Judge: no rank keeps more than `nbytes(inputs)` of its own tensors, beside what it returns; `what` names the
    bound."""

    def accept(answer: Answer) -> str | None:
        bound = nbytes(answer.inputs)
        for rank, one in enumerate(answer.evidence):
            if one.alive > bound:
                kept = f"{one.alive} bytes of tensors after the call"
                return f"rank {rank} keeps {kept}; {what} is {int(bound)}. Let go of the rest"
        return None

    return accept


def no_tensor_above(what: str, nbytes: Callable[[Any], float]) -> Accept:
    """Judge: no operation makes a tensor larger than `nbytes(inputs)`; `what` names the bound."""

    def accept(answer: Answer) -> str | None:
        bound = nbytes(answer.inputs)
        largest = max(one.largest for one in answer.evidence)
        return f"its largest tensor has {largest} bytes; {what} is {int(bound)}" if largest > bound else None

    return accept
