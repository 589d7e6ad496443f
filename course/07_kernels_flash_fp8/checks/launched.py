"""How lab 07 judges a kernel: one launch, on the arguments of the function, that writes every number of its result
once.

A kernel is judged by its result, in several orders of its threads, and by its memory accesses, which the emulator
counts and `given/cuda.py` notes. One launch must compute everything from the arrays as they were given: a number that
it gets is a size, or the one that the function got.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from labkit.exercises import Accept, Answer


@dataclasses.dataclass(frozen=True)
class OneLaunch:
    """The requirements on a function that launches one kernel.

    Attributes:
        function: its name, for messages.
        arrays: inputs that the kernel gets, the first of the shape of the result.
        want: the right result, in float64.
        wrong: results of known mistakes, each with a sentence about it.
        number: the input that the kernel gets as a number, beside sizes.
        near: whether a result is another one, up to rounding.
        note: explains a wrong result, as far as it can.
        threads: checks a launch of `grid` blocks of `block` threads; returns what is wrong, or None.
    """

    function: str
    arrays: tuple[str, ...]
    want: Callable[..., torch.Tensor]
    wrong: Callable[..., list[tuple[torch.Tensor, str]]]
    number: str = ""
    threads: Callable[[torch.Tensor, int, int], str | None] = lambda x, grid, block: None
    near: Callable[[torch.Tensor, torch.Tensor], bool] = lambda got, want: close(got, want)
    note: Callable[[torch.Tensor, torch.Tensor], str | None] = lambda got, want: None

    def right(self, answer: Answer) -> str | None:
        """Check that y is right in every order of the threads, and that one launch wrote each element of it once."""
        if sentence := self._given(answer):
            return sentence
        y, launch = answer.value, launch_of(answer)
        x = answer.inputs[self.arrays[0]]
        if not isinstance(y, torch.Tensor) or y.shape != x.shape or y.dtype != x.dtype:
            dtype = str(x.dtype).removeprefix("torch.")
            return f"{self.function} must return a tensor {list(x.shape)} of {dtype}"
        sent = launch["outputs"][0]
        name = next((name for name in sent if same(sent[name].nan_to_num(), y.nan_to_num())), None)
        if name is None:
            return f"{self.function} must return what the kernel wrote into y"
        writes = launch["writes"][name].view(x.shape)
        if not writes.all():
            missing = int((writes == 0).sum())
            return f"{_place(writes == 0)} was never written; missing: {missing} of {y.numel()} numbers"
        want = self.want(**answer.inputs)
        right = [self.near(outputs[name].view(x.shape), want) for outputs in launch["outputs"]]
        if any(right) and not all(right):
            return "in another order of its threads y differs: one reads what another has not written yet"
        if not right[0]:
            return self._what_is_wrong(answer, y, want)
        times = launch["counts"][name]["written"] / y.nbytes
        if times != 1:
            return f"it writes y {times:.4g} times; once is enough: do several threads do the same work?"
        return None

    def _given(self, answer: Answer) -> str | None:
        """Check for one launch on the arrays and the number as given, so that y was computed in the kernel."""
        launches = answer.evidence[0].notes.get("launch", [])
        if not launches:
            return f"no kernel ran: {self.function} must call it"
        if failed := next((one for one in launches if one["error"]), None):
            return f"{failed['error']}"
        if len(launches) > 1:
            return f"{self.function} launches {len(launches)} kernels; one launch computes all of y"
        launch, given = launches[0], [answer.inputs[name] for name in self.arrays]
        for name, array in launch["arrays"].items():
            if name not in launch["writes"] and not any(same(array, one) for one in given):
                return f"the kernel's {name} is neither {' nor '.join(self.arrays)}, as {self.function} got them"
        if not any(same(array, given[0]) for name, array in launch["arrays"].items() if name not in launch["writes"]):
            return f"the kernel does not get {self.arrays[0]}: it computes y from it"
        x = given[0]
        if sentence := self.threads(x, launch["grid"], launch["block"]):
            return sentence
        known = [*([answer.inputs[self.number]] if self.number else []), 1 / x.shape[-1], *map(float, x.shape)]
        for name, number in launch["numbers"].items():
            fits = abs(number) <= 4 * x.numel() if isinstance(number, int) else any(
                abs(number - one) <= 1e-6 * abs(one) for one in known)  # fmt: skip
            if not fits and float(number) not in known:
                wanted = f"neither {self.number} nor a size" if self.number else "no size"
                return f"the kernel gets {name} = {number:.6g}, which is {wanted}"
        return None

    def _what_is_wrong(self, answer: Answer, y: torch.Tensor, want: torch.Tensor) -> str:
        note = launch_of(answer)["note"]
        if found := next((why for other, why in self.wrong(**answer.inputs) if self.near(y, other)), None):
            return found
        if not y.isnan().any() and (found := self.note(y, want)):
            return found
        rtol = 1e-4 if y.dtype == torch.float32 else 2.0**-8
        off = ~torch.isclose(y.double(), want, rtol=rtol, atol=1e-5)
        place = tuple(off.nonzero()[0].tolist())
        got = "no number" if y[place].isnan() else f"{y[place]:.6g}"
        note = note or "a variable that was given no value holds NaN here" * bool(y[place].isnan())
        return f"{_place(off)} is {got}, expected {want[place]:.6g}{f' ({note})' if note else ''}"


def launch_of(answer: Answer) -> dict[str, Any]:
    """The first launch of an answer."""
    return answer.evidence[0].notes["launch"][0]


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two results are equal up to rounding in float32."""
    return torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results have the same bits, in any shape."""
    bits = {4: torch.int32, 2: torch.int16}.get(one.element_size())
    return bits is not None and one.dtype == other.dtype and one.numel() == other.numel() and torch.equal(
        one.flatten().view(bits), other.contiguous().flatten().view(bits))  # fmt: skip


def same_bf16(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether bf16 numbers are those of `want`, rounded once: float32 on the way moves few of them, by one step."""
    rounded = want.to(torch.bfloat16).double()
    off = got.double() != rounded
    near = torch.isclose(got.double(), rounded, rtol=2.0**-7, atol=1e-30)
    return bool(near.all()) and float(off.double().mean()) < 0.03


def reads(most: float) -> Accept:
    """Return a check that x is read at most `most` times."""

    def accept(answer: Answer) -> str | None:
        read = sum(of["read"] for of in counts_of(answer, "x"))
        times = read / answer.inputs["x"].nbytes
        enough = "once is enough" if most == 1 else f"{most:g} are enough"
        return f"it reads x {times:.4g} times; {enough}" if times > most else None

    return accept


def counts_of(answer: Answer, what: str) -> list[dict[str, Any]]:
    """The counts of the arrays that hold an input."""
    launch = launch_of(answer)
    names = [name for name, array in launch["arrays"].items() if name not in launch["writes"]]
    return [launch["counts"][name] for name in names if same(launch["arrays"][name], answer.inputs[what])]


def coalesced(answer: Answer) -> str | None:
    """Check that most of the bytes that are fetched for x were asked for."""
    counts = counts_of(answer, "x")
    share = sum(of["read"] for of in counts) / max(1, sum(of["served"] for of in counts))
    if share < 0.6:
        return (f"of the bytes that are fetched for x, {share:.0%} are asked for: neighbouring threads must read "
                "neighbouring numbers")  # fmt: skip
    return None


def _place(where: torch.Tensor) -> str:
    return f"y{where.nonzero()[0].tolist()}"
