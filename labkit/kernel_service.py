"""Launches a learner's kernels in the judge's process, on request over a line, and keeps counts and results there.

The problem in a sentence: a check that asks the learner's process what its kernel did cannot tell a kernel from an
object in place of `Kernel`, from torch behind a kernel that only copies, or from counts that Python wrote.

The learner's process names the kernel's text, its arguments and the number of threads, and gets back the contents of
the arrays that are not const. The judge gets the inputs and the results of each launch:

| entry       | contents                                                                                          |
|-------------|---------------------------------------------------------------------------------------------------|
| `name`      | of the kernel; `text`, the digest of its text                                                     |
| `arrays`    | {parameter: tensor as it was given}; `numbers`: {parameter: int or float}                         |
| `grid`      | and `block`                                                                                       |
| `outputs`   | for each order of the threads that was tried: {parameter that is not const: tensor}; `marked`,    |
|             | those of the first order as they were sent back                                                   |
| `other`     | the same launch on other numbers: `arrays`, those of const float, drawn anew; `outputs`; `counts` |
| `writes`    | {parameter that is not const: how often each number was written}                                  |
| `counts`    | as `Kernel.counts`, of the launch on other numbers if there is one                                |
| `note`      | explains a wrong result; `error` and `line`: why the launch failed                                |

Arrays that are not const are filled with NaN before a launch, so that old contents are no answer. Each launch runs in
several orders of its threads, from the same start.

The results that are sent back to the learner's process are marked: the last bits of some floats, drawn at random, are
flipped. A result that torch computed beside the kernel lacks the mark, though it is right too (`marked`).

Python could compute the answer and pass it to the kernel as numbers: enough integers can encode anything. So each
launch is repeated with the same numbers and with new random arrays: then numbers that Python computed are wrong, and a
kernel that computes is right. `other` is None if the repeated launch fails.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from labkit.broker import Letter
from labkit.cuda_text import Parameter
from labkit.emulator import CHECKED_TURNS, Emulator, LaunchError, fitting
from minimegatron.kernels.operators import KernelError

ORDERS = (0, 1, 2, 3)
_MAX_LAUNCHES = 256  # in one trial
_MAX_NUMBERS = 1 << 22  # in all arrays of all launches


class KernelService:
    """A `broker.Service` that launches kernels.

    Args:
        libraries: {digest: {"library": bytes as a tensor, "name": str, "parameters": [[kind, name], ...]}}.
        folder: folder from which libraries are loaded.
    """

    def __init__(self, libraries: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
        self._known: dict[str, tuple[Path, str, list[Parameter]]] = {}
        self._loaded: dict[str, Emulator] = {}
        for digest, one in libraries.items():
            path = folder / f"{digest}.so"
            path.write_bytes(one["library"].numpy().tobytes())
            self._known[digest] = path, one["name"], [Parameter(*pair) for pair in one["parameters"]]
        self._trials: list[list[dict[str, Any]]] = []
        self._numbers = 0
        self._generator = torch.Generator().manual_seed(secrets.randbits(63))

    def handle(self, rank: int, header: dict[str, Any], tensors: list[torch.Tensor]) -> Iterable[Letter]:
        """`{"do": "trial"}` begins a trial; `{"do": "launch", "text", "numbers", "grid", "block"}` launches.

        Raises:
            KernelError: there is no such text, or its arguments do not fit.
        """
        number = header["id"]
        if header["do"] == "trial":
            self._trials.append([])
            return [(rank, {"id": number}, ())]
        text = header["text"]
        if text not in self._known:
            raise KernelError('this kernel was not compiled before the check: write its text in Kernel(r"""...""")')
        _, name, parameters = self._known[text]
        args = _arguments(parameters, tensors, list(header["numbers"]))
        grid, block = header["grid"], header["block"]
        fitting(name, parameters, args, grid, block)
        self._numbers += sum(tensor.numel() for tensor in tensors)
        if not self._trials or len(self._trials[-1]) >= _MAX_LAUNCHES or self._numbers > _MAX_NUMBERS:
            raise KernelError("so many launches, or such large arrays, are none that a check of a kernel needs")
        record = self._launched(text, args, grid, block)
        self._trials[-1].append(record)
        if record["error"]:
            return [(rank, {"id": number, "failed": record["error"], "line": record["line"]}, ())]
        return [(rank, {"id": number, "counts": record["counts"]}, [*record["marked"].values()])]

    def _launched(self, text: str, args: list[Any], grid: int, block: int) -> dict[str, Any]:
        path, name, parameters = self._known[text]
        if text not in self._loaded:
            self._loaded[text] = Emulator(path, name, parameters)
        named = list(zip(parameters, args, strict=True))
        record: dict[str, Any] = {
            "name": name, "text": text, "grid": grid, "block": block, "outputs": [], "writes": {}, "counts": {},
            "note": "", "error": "", "line": 0, "other": None, "marked": {},
            "arrays": {p.name: value.clone() for p, value in named if "*" in p.kind},
            "numbers": {p.name: value for p, value in named if "*" not in p.kind},
        }  # fmt: skip
        for order in ORDERS:
            fresh = [_before(p, value) for p, value in named]
            try:
                done = self._loaded[text].launch(fresh, grid, block, order=order, turns=CHECKED_TURNS, quiet=True)
            except LaunchError as error:
                record.update(error=error.what, line=error.line)
                return record
            if order == 0:
                record.update(counts=done.counts, writes=done.writes)
            record["note"] = record["note"] or done.note
            record["outputs"].append({p.name: a for p, a in zip(parameters, fresh, strict=True) if _is_written(p)})
        record["marked"] = {name: self._marked(one) for name, one in record["outputs"][0].items()}
        if other := self._on_others(text, named, grid, block):
            record.update(other=other, counts=other["counts"])  # a kernel that knows its arrays could save itself work
        return record

    def _marked(self, output: torch.Tensor) -> torch.Tensor:
        """A copy with the last bit of about half of the finite floats flipped, at least of one."""
        if not output.dtype.is_floating_point:
            return output
        places = torch.isfinite(output).flatten().nonzero().flatten()
        chosen = torch.randint(2, places.shape, generator=self._generator, dtype=torch.int32)
        if len(chosen):
            chosen[torch.randint(len(chosen), (1,), generator=self._generator)] = 1
        turned = torch.zeros(output.numel(), dtype=torch.int32).index_put_((places,), chosen).view(output.shape)
        return (output.view(torch.int32) ^ turned).view(output.dtype)

    def _on_others(self, text: str, named: list[tuple[Parameter, Any]], grid: int, block: int) -> dict[str, Any] | None:
        """The launch on new random arrays; an array that is passed twice stays one. None if it fails."""
        drawn: dict[bytes, torch.Tensor] = {}
        args = []
        for parameter, value in named:
            if parameter.kind == "const float*":
                fresh = torch.randn(value.shape, generator=self._generator)
                value = drawn.setdefault(value.numpy().tobytes(), fresh)
            args.append(_before(parameter, value))
        arrays = {p.name: value.clone() for (p, _), value in zip(named, args, strict=True) if p.kind == "const float*"}
        try:
            counts = self._loaded[text].launch(args, grid, block, turns=CHECKED_TURNS, quiet=True).counts
        except LaunchError:
            return None
        outputs = {p.name: value for (p, _), value in zip(named, args, strict=True) if _is_written(p)}
        return {"arrays": arrays, "outputs": outputs, "counts": counts}

    def gone(self, rank: int) -> Iterable[Letter]:
        return []

    def idle(self) -> Iterable[Letter]:
        return []

    def evidence(self) -> list[list[dict[str, Any]]]:
        """The launches of each trial."""
        return self._trials


def _is_written(parameter: Parameter) -> bool:
    return parameter.kind in ("float*", "int*")


def _before(parameter: Parameter, value: Any) -> Any:
    """The value that the kernel gets for an argument."""
    if "*" not in parameter.kind:
        return value
    if not _is_written(parameter):
        return value.clone()
    return torch.full_like(value, torch.nan if value.dtype.is_floating_point else -(1 << 31))


def _arguments(parameters: list[Parameter], tensors: list[torch.Tensor], numbers: list[Any]) -> list[Any]:
    """Arguments in the order of the parameters."""
    arrays = sum("*" in p.kind for p in parameters)
    if len(tensors) != arrays or len(numbers) != len(parameters) - arrays:
        raise KernelError(f"the kernel takes {arrays} tensors and {len(parameters) - arrays} numbers")
    of_tensors, of_numbers = iter(tensors), iter(numbers)
    return [next(of_tensors) if "*" in p.kind else next(of_numbers) for p in parameters]
