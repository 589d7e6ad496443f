"""Is this answer right? Comparison of plain data, in words, and ready-made judges of evidence.

`difference` says in one short phrase how an answer departs from what was expected, or None. It is strict where a
learner means something (dtype, shape, length, whole numbers) and lenient where not (tuple or list, 8 or 8.0, a number
or a tensor of no dimensions). The makers below it build functions for `Exercise.accept` and `Case.accept`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from labkit.exercises import Accept, Answer

# dtype -> (relative, absolute): wide enough for another order of summation, narrower than any wrong formula.
TOLERANCES = {
    torch.float64: (1e-7, 1e-9), torch.float32: (1e-4, 1e-5), torch.bfloat16: (1.6e-2, 1e-3),
    torch.float16: (2e-3, 1e-4), torch.float8_e4m3fn: (0.0, 0.0), torch.float8_e5m2: (0.0, 0.0),
}  # fmt: skip
_NUMBER = (1e-6, 1e-9)
_SHORT = 64


def difference(got: Any, want: Any, rtol: float | None = None, atol: float | None = None) -> str | None:
    """None if `got` is as good as `want`; else what differs, in one phrase with both values."""
    if isinstance(want, torch.Tensor):
        return _tensor_difference(got, want, rtol, atol)
    if isinstance(got, torch.Tensor) and got.ndim == 0:
        got = got.item()
    if isinstance(want, list | tuple) and isinstance(got, list | tuple):
        return _list_difference(list(got), list(want), rtol, atol)
    if isinstance(want, dict) and isinstance(got, dict):
        return _dict_difference(got, want, rtol, atol)
    return None if _same_scalar(got, want, rtol, atol) else f"got {show(got)}, expected {show(want)}"


def show(value: Any) -> str:
    """A short form of a value for a table."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.numel() > 8:
            return f"a tensor {list(value.shape)} of {dtype}"
        return f"tensor({_text(value.to(torch.float64).tolist() if value.is_floating_point() else value.tolist())})"
    if isinstance(value, list | tuple) and len(_text(value)) > _SHORT:
        return f"a list of {len(value)}"
    return _text(value)[:_SHORT]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if not value.is_integer() or abs(value) > 1e15 else f"{value:.1f}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(k)}: {_text(v)}' for k, v in value.items())}}}"
    return show(value) if isinstance(value, torch.Tensor) else repr(value)


def _same_scalar(got: Any, want: Any, rtol: float | None, atol: float | None) -> bool:
    number = isinstance(got, int | float) and isinstance(want, int | float)
    if not number or isinstance(got, bool) != isinstance(want, bool):
        return type(got) is type(want) and got == want
    if isinstance(want, int) and (isinstance(got, int) or got.is_integer()):
        return got == want
    if math.isnan(got) or math.isnan(want):
        return math.isnan(got) and math.isnan(want)
    relative, absolute = _NUMBER[0] if rtol is None else rtol, _NUMBER[1] if atol is None else atol
    return math.isclose(got, want, rel_tol=relative, abs_tol=absolute)


def _list_difference(got: list[Any], want: list[Any], rtol: float | None, atol: float | None) -> str | None:
    phrases = [difference(g, w, rtol, atol) for g, w in zip(got, want, strict=False)]
    first = next((i for i, phrase in enumerate(phrases) if phrase), None)
    if first is None and len(got) == len(want):
        return None
    if len(_text(got)) <= _SHORT and len(_text(want)) <= _SHORT:
        return f"got {_text(got)}, expected {_text(want)}"
    if len(got) != len(want):
        return f"got {len(got)} items, expected {len(want)}"
    return f"at [{first}]: {phrases[first or 0]}"


def _dict_difference(got: dict[Any, Any], want: dict[Any, Any], rtol: float | None, atol: float | None) -> str | None:
    if got.keys() != want.keys():
        return f"got the keys {_text(list(got))}, expected {_text(list(want))}"
    for key in want:
        if phrase := difference(got[key], want[key], rtol, atol):
            return f"{key}: {phrase}"
    return None


def _tensor_difference(got: Any, want: torch.Tensor, rtol: float | None, atol: float | None) -> str | None:
    if want.ndim == 0 and isinstance(got, int | float) and not isinstance(got, bool):
        got = torch.tensor(got, dtype=want.dtype)
    if not isinstance(got, torch.Tensor):
        return f"got {show(got)}, expected a tensor {list(want.shape)}"
    if got.shape != want.shape:
        return f"got a tensor {list(got.shape)}, expected {list(want.shape)}"
    if got.dtype != want.dtype:
        return f"got dtype {str(got.dtype).removeprefix('torch.')}, expected {str(want.dtype).removeprefix('torch.')}"
    relative, absolute = TOLERANCES.get(want.dtype, (0.0, 0.0))
    relative, absolute = relative if rtol is None else rtol, absolute if atol is None else atol
    a, b = (got.double(), want.double()) if want.is_floating_point() else (got, want)
    same = torch.isclose(a, b, rtol=relative, atol=absolute, equal_nan=True) if want.is_floating_point() else a == b
    if bool(same.all()):
        return None
    if want.numel() <= 8:
        return f"got {show(got)}, expected {show(want)}"
    index = torch.nonzero(~same)[0].tolist()
    at = tuple(index)
    return (f"at {index}: got {_text(a[at].item())}, expected {_text(b[at].item())} "
            f"({int((~same).sum())} of {want.numel()} differ)")  # fmt: skip


def only(*names: str) -> Accept:
    """Every communication is one of these: `only("send", "recv")`; `only()` forbids them all."""

    def accept(answer: Answer) -> str | None:
        other = sorted({call.name for one in answer.evidence for call in one.calls} - set(names))
        return f"it calls {', '.join(other)}; allowed here: {', '.join(names) or 'no communication'}" if other else None

    return accept


def count(name: str, times: Callable[[Any], int] | int) -> Accept:
    """Every rank makes exactly `times` (a number, or a function of the case's inputs) communications called `name`."""

    def accept(answer: Answer) -> str | None:
        want = times(answer.inputs) if callable(times) else times
        for rank, one in enumerate(answer.evidence):
            if one.count(name) != want:
                return f"rank {rank} calls {name} {one.count(name)} times, expected {want}"
        return None

    return accept


def at_most(what: str, nbytes: Callable[[Any], float], *names: str) -> Accept:
    """No rank moves more than `nbytes(inputs)` with these communications; `what` names the bound: "2 (N-1)/N n"."""

    def accept(answer: Answer) -> str | None:
        bound = nbytes(answer.inputs)
        for rank, one in enumerate(answer.evidence):
            if one.nbytes(*names) > bound:
                return f"rank {rank} moves {one.nbytes(*names)} bytes; {what} is {int(bound)}"
        return None

    return accept


def to_the_next(answer: Answer) -> str | None:
    """Every rank sends to the rank after it and to no other, as in a ring."""
    for rank, one in enumerate(answer.evidence):
        after = (rank + 1) % len(answer.evidence)
        if others := sorted({call.peer for call in one.calls if call.name == "send"} - {after}):
            return f"rank {rank} sends to rank {others[0]}; in this ring it sends to the next rank only, {after}"
    return None


def in_order(*steps: str) -> Accept:
    """On every rank these steps happen in this order, others between them or not.

    A step is a communication (`all_reduce`), `wait` for one, or `matmul`: `in_order("all_reduce", "matmul", "wait")`
    asks that something is computed between the start of an all-reduce and the wait for it.
    """

    def accept(answer: Answer) -> str | None:
        for rank, one in enumerate(answer.evidence):
            left = iter(what for what, _ in one.order)
            missing = next((i for i, step in enumerate(steps) if step not in left), None)
            if missing is not None:
                before = f" after {' and '.join(steps[:missing])}" if missing else ""
                return f"rank {rank}: no {steps[missing]}{before}; the order asked for is {', '.join(steps)}"
        return None

    return accept


def busy_during(name: str, multiply_adds: Callable[[Any], float]) -> Accept:
    """While a communication `name` travels, each rank computes matrix products of so many multiply-adds in all.

    It travels from its start to the next `wait`; one that is not waited for counts as not travelling.
    """

    def accept(answer: Answer) -> str | None:
        bound = multiply_adds(answer.inputs)
        for rank, one in enumerate(answer.evidence):
            done = sum(_between(list(one.order), name))
            if done < bound:
                return (f"rank {rank} computes {done} multiply-adds while {name} travels, of {int(bound)} that could "
                        "be done meanwhile")  # fmt: skip
        return None

    return accept


def _between(order: list[tuple[str, int]], name: str) -> list[int]:
    """Multiply-adds of every product between a start of `name` and the wait after it."""
    found: list[int] = []
    meanwhile: list[int] | None = None
    for what, much in order:
        if what == name and meanwhile is None:
            meanwhile = []
        elif what == "wait" and meanwhile is not None:
            found, meanwhile = found + meanwhile, None
        elif what == "matmul" and meanwhile is not None:
            meanwhile.append(much)
    return found


def peak_at_most(what: str, nbytes: Callable[[Any], float]) -> Accept:
    """No rank holds more than `nbytes(inputs)` at a time of what it makes; `what` names the bound."""

    def accept(answer: Answer) -> str | None:
        bound = nbytes(answer.inputs)
        for rank, one in enumerate(answer.evidence):
            if one.peak > bound:
                return f"rank {rank} holds {one.peak} bytes at once; {what} is {int(bound)}"
        return None

    return accept


def no_tensor_above(what: str, nbytes: Callable[[Any], float]) -> Accept:
    """No operation makes a tensor larger than `nbytes(inputs)`; `what` names the bound."""

    def accept(answer: Answer) -> str | None:
        bound = nbytes(answer.inputs)
        largest = max(one.largest for one in answer.evidence)
        return f"its largest tensor has {largest} bytes; {what} is {int(bound)}" if largest > bound else None

    return accept
