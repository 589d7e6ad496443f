"""Compiles a learner's text: for the emulator by g++, for a GPU by nvcc, and before a check what a cell holds.

The problem in a sentence: the compiler must tell the runtime of every access, and nobody should wait for what is the
same in all kernels.

    text ──g++ -S──> assembly ──annotated──> + table of lines ──g++ -shared──> library, with the runtime in it

The runtime is compiled once for a machine (`runtime`), a text once for a cache. In a check the learner's process may
start no program: `prepare` has a process of its own compile the cell before it, under the sandbox with one freedom
more. It runs nothing of the learner's; what it sends back are libraries.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from labkit import sandbox
from labkit.exercises import Prepared
from labkit.fresh import Nursery
from labkit.nursery import Limits
from minimegatron.data.publish import build_once
from minimegatron.errors import MinimegatronError
from minimegatron.kernels import build

from .text import CompileError, annotated, digest, explained, kernel_of, texts, todo, translated

CSRC = Path(__file__).parent / "csrc"
COMPILE_SECONDS = 45.0
_TEXT = (
    "-O0", "-g1", "-fno-exceptions", "-fno-threadsafe-statics", "-fwrapv", "-fno-strict-aliasing",
    "-fno-delete-null-pointer-checks", "-Werror=vla", "-fmax-errors=1", "-fsanitize=thread",
    "-fsanitize=bounds,bounds-strict,alignment,integer-divide-by-zero", "-fsanitize-coverage=trace-pc", f"-I{CSRC}",
    f"-I{CSRC / 'include'}", f"-I{build.CSRC}", "-include", "lab.h",
)  # fmt: skip
_SINCE_12 = ("--param", "tsan-instrument-func-entry-exit=0", "-ftrivial-auto-var-init=pattern")  # GCC's version
_BOTH = ("-std=c++17", "-fPIC", "-fno-gnu-unique", "-ffp-contract=off", "-DMM_EMULATE")
_RUNTIME = ("-O2", "-g0", "-fno-weak", "-w", f"-I{build.CSRC}")


def runtime() -> Path:
    """The folder of the compiled runtime, which every kernel's library contains; built once for a machine.

    Raises:
        KernelsUnavailable: no compiler, or no writable folder.
    """
    program = _compiler()
    source = (CSRC / "runtime.cc").read_text()
    key = _key(source, (build.CSRC / "emulator.h").read_text(), build.compiler_version(program), *_BOTH, *_RUNTIME)
    folder = build.cache_folder() / f"lab-runtime-{key}"
    if not folder.is_dir():  # asked first: a process in the sandbox may not lock what is outside of it
        command = [program, *_BOTH, *_RUNTIME, "-c", os.fspath(CSRC / "runtime.cc"), "-o", "runtime.o"]
        build_once(os.fspath(folder), lambda stage: _run(command, stage), os.path.isdir)
    return folder


def build_library(
    source: str, line: int, name: str, *, toolchain: Path | None = None, cache: Path | None = None
) -> Path:
    """The library of a learner's text, for the emulator.

    Args:
        line: line of the cell on which the text begins.
        name: of the kernel.
        toolchain: the folder with the runtime; by default `runtime` is called.
        cache: folder of libraries.
    Raises:
        CompileError: the text is refused; with the line of the cell.
        KernelsUnavailable: there is no compiler.
    """
    program, ready = _compiler(), (toolchain or runtime()) / "runtime.o"
    text, version = translated(source, line, name, on_gpu=False), build.compiler_version(program)
    found = re.search(r"\b(\d+)\.\d+\.\d+", version)
    flags = (*_BOTH, *_TEXT, *(_SINCE_12 if found and int(found[1]) >= 12 else ()))
    headers = "".join(path.read_text() for path in sorted([*CSRC.rglob("*.h"), build.CSRC / "device.h"]))
    key = _key(text, headers, os.fspath(ready), version, *flags)
    folder = (cache or build.cache_folder()) / f"lab-{key}"

    def make(stage: str) -> None:
        here = Path(stage)
        (here / "kernel.cc").write_text(text)
        _run([program, *flags, "-S", "kernel.cc", "-o", "kernel.s"], stage)
        (here / "kernel.s").write_text(annotated((here / "kernel.s").read_text(), source, line))
        _run([program, "-shared", os.fspath(ready), "kernel.s", "-o", "lib.so"], stage)

    build_once(os.fspath(folder), make, lambda path: os.path.isfile(os.path.join(path, "lib.so")))
    return folder / "lib.so"


def _compiler() -> str:
    program = build.compiler("emulated")
    if program is None or "clang" in build.compiler_version(program) or sys.platform != "linux":
        raise build.KernelsUnavailable("no g++ on this machine", where="kernels", fix="install g++ (GCC), on Linux")
    return program


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(command: list[str], folder: str) -> None:
    environment = {**os.environ, "TMPDIR": folder, "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=COMPILE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise CompileError(f"the compiler was not done after {COMPILE_SECONDS:g} s") from None
    if done.returncode:
        raise explained(done.stderr)


def build_for_gpu(
    source: str, line: int, name: str, *, cache: Path | None = None, capability: tuple[int, int] | None = None
) -> Path:
    """The library that nvcc makes of a text.

    Raises:
        CompileError: the text is refused; with the line of the cell.
        KernelsUnavailable: there is no nvcc.
    """
    text = translated(source, line, name, on_gpu=True)
    try:
        return build.library(
            "lab", "cuda", source=text, extra=(f"-I{CSRC}",), cache=cache, capability=capability,
            deadline_s=COMPILE_SECONDS,
        )  # fmt: skip
    except build.KernelsUnavailable as error:
        if "took longer than" in error.what:
            raise CompileError(f"the compiler was not done after {COMPILE_SECONDS:g} s") from None
        if "the compiler refused it" not in error.what:
            raise
        raise explained(error.what.partition("\n")[2]) from None


# ------------------------------------------------------------------------------------------------------ for a check


def prepare(nursery: Nursery, cell: str, hidden: str) -> Prepared:
    """`Exercise.prepare` of an exercise with kernels: their libraries, or why there are none.

    Raises:
        KernelsUnavailable: the machine cannot compile, which is no wrong answer.
    """
    if todo(cell):  # a lab that has not been begun needs no compiler
        return Prepared({})
    job = {"cell": cell, "toolchain": os.fspath(runtime()), "hidden": hidden}
    [reply] = nursery.call(compile_cell, [job], Limits(seconds=COMPILE_SECONDS), path=sys.path)
    said = reply.value if isinstance(reply.value, dict) else {}
    if "libraries" in said:
        return Prepared(said["libraries"])
    if "unavailable" in said:
        raise build.KernelsUnavailable(said["unavailable"], where="kernels", fix="install g++")
    if "error" in said:
        lines, line = cell.splitlines(), said["line"]
        where = f" (line {line}: {lines[line - 1].strip()})" if 1 <= line <= len(lines) else ""
        return Prepared(outcome={"error": f"{said['error']}{where}", "unread": True})
    why = f"it was not done after {COMPILE_SECONDS:g} s" if reply.ended == "late" else reply.ended
    return Prepared(outcome={"error": f"the compiler gave no answer: {why or 'it sent what cannot be read'}"})


def compile_cell(rank: int, world: int, job: dict[str, str]) -> dict[str, Any]:
    """Compile the kernels of a cell: in a process of the nursery, under the sandbox, that may start a compiler.

    Args:
        job: `cell` its text, `toolchain` the folder, `hidden` what must not be read.

    Returns:
        `{"libraries": {digest: library}}`, `{"error": text, "line": n}`, or `{"unavailable": text}`.
    """
    folder = Path(job["toolchain"])
    sandbox.enter(Path.cwd(), hidden=(Path(job["hidden"]),), programs=True, extra=(folder, *sandbox.GIVEN))
    try:
        libraries = {}
        for source, line, name in texts(job["cell"]):
            kernel = kernel_of(source, line, name)
            path = build_library(source, line, kernel.name, toolchain=folder, cache=Path.cwd() / "cache")
            libraries[digest(source + name)] = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        return {"libraries": libraries}
    except CompileError as error:
        return {"error": error.what, "line": error.line}
    except MinimegatronError as error:
        return {"unavailable": error.what}
