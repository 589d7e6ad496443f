"""The project's CUDA kernels, by the emulator, on the memory inside the simulated tensors.

Two functions are replaced: the compiler for `cuda` is the one for `emulated`, and so is the library.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from minimegatron.kernels import build, operators
from tests.rehearsal.capture import capturing
from tests.rehearsal.record import RECORD, place
from tests.rehearsal.rules import MixedDevices
from tests.rehearsal.tensor import CudaTensor, unwrap


class EmulatedLibrary:
    """A kernel file: `call` launches on tensors of the simulated GPU."""

    def __init__(self, library: operators.Library) -> None:
        self._library = library

    def call(self, launcher: str, *args: Any) -> None:
        given = [a for a in args if isinstance(a, torch.Tensor)]
        if any(not isinstance(a, CudaTensor) for a in given):
            raise MixedDevices(f"kernel {launcher} got a pointer to the host's memory at {place()}")
        RECORD.launch(launcher)
        inner = unwrap(args)

        def compute() -> None:
            self._library.call(launcher, *inner)

        tape = capturing()
        if tape is None:
            compute()
        else:
            tape.run(compute, [], unwrap(given))

    def ask(self, launcher: str, *args: Any) -> int:
        return self._library.ask(launcher, *args)


def install(build_them: bool = True) -> None:
    """Let kernels for `cuda` be emulated; without `build_them` there is no compiler, and torch computes."""
    real_compiler, real_library = build.compiler, operators.library

    @functools.cache
    def library(name: str, target: str) -> Any:
        if target == "cpu":  # what the same process computes on a CPU, to compare with
            return real_library(name, target)
        found = real_library(name, "emulated")
        return EmulatedLibrary(found) if target == "cuda" else found

    build.compiler = lambda target: real_compiler("emulated") if build_them or target != "cuda" else None
    operators.library = library
