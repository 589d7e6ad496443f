"""Compiles a kernel file into a library: built once, by one process, and found by every later one.

The problem in a sentence: eight ranks start at once on a machine where nothing is compiled, one of them is killed
half-way, the next run has another version of torch, and all of them must end up with a library that is whole and of
*this* source.

    key      = hash of (the .cu file, the headers, compiler and its version, flags, torch, CUDA)
    library  = <cache>/<name>-<target>-<key>/lib.so

The folder appears by one rename when the compiler is done (`data/publish.py`), under a lock that the kernel of the
operating system releases when its holder dies. So a library that exists is complete, an outdated one has another name,
and a killed build leaves a staging folder that the next one removes.

| target     | compiler            | runs on                                               |
|------------|---------------------|-------------------------------------------------------|
| `cuda`     | nvcc, see `toolkit` | the GPU's architecture; 9.0 means sm_90a              |
| `emulated` | g++ (or clang++)    | any CPU, through `csrc/emulator.h`                    |
| `cpu`      | g++ (or clang++)    | this CPU, with all instructions that it has (`.cpp`)  |

A kernel for CPUs that came with the wheel is taken as it is (`prebuilt`). `python -m minimegatron.kernels.build` builds
those for this CPU beforehand, as `make lab` and `make test` do: on a slow machine the compiler may take longer than the
ranks that wait for a message.

The cache is `$MINIMEGATRON_KERNEL_CACHE`, else `minimegatron/kernels` in `$XDG_CACHE_HOME` or `~/.cache`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import signal
import subprocess
from pathlib import Path

import torch

from minimegatron.data.publish import build_once
from minimegatron.errors import DataError
from minimegatron.kernels import prebuilt, toolkit
from minimegatron.kernels.toolkit import KernelsUnavailable
from minimegatron.launch import procs

CSRC = Path(__file__).parent / "csrc"
COMPILE_DEADLINE_S = 600.0
EMULATED_FLAGS = (
    "-x", "c++", "-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-fno-gnu-unique", "-ffp-contract=off", "-DMM_EMULATE",
    "-U_FORTIFY_SOURCE", "-Wall", "-Wno-unknown-pragmas",
)  # fmt: skip
CPU_FLAGS = (*prebuilt.FLAGS, "-march=native")
CUDA_FLAGS = ("-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", "--cudart=static", "-Xptxas", "-v")


def sources(suffix: str = "cu") -> list[str]:
    """Names of the kernel files: `cu` for GPUs, `cpp` for CPUs."""
    return sorted(path.stem for path in CSRC.glob(f"*.{suffix}"))


def cache_folder() -> Path:
    """Where libraries are kept."""
    chosen = os.environ.get("MINIMEGATRON_KERNEL_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minimegatron" / "kernels"


def compiler(target: str) -> str | None:
    """Path of the compiler for a target, None when there is none."""
    if target == "cuda":
        found = toolkit.nvcc()
        return None if found is None else found.path
    return prebuilt.compiler()


def source_of(name: str, target: str) -> str:
    """The text of a kernel file."""
    return (CSRC / f"{name}.{'cpp' if target == 'cpu' else 'cu'}").read_text()


@functools.cache
def cpu_instructions() -> str:
    """The instruction sets of the CPU: a library for this CPU does not run on another, which may share the cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def came_along(name: str) -> Path | None:
    """The library of a kernel file that the wheel brought for this CPU; None if it has none."""
    return prebuilt.found(name, cpu_instructions().split(), prebuilt.FOLDER)


@functools.cache
def compiler_version(path: str) -> str:
    """The version text of a compiler."""
    return subprocess.run((path, "--version"), capture_output=True, text=True, timeout=60, check=True).stdout


def gencode(capability: tuple[int, int]) -> tuple[str, ...]:
    """nvcc's flags for a GPU: exactly this architecture, from 9.0 on with architecture-specific instructions."""
    arch = f"{capability[0]}{capability[1]}" + ("a" if capability[0] >= 9 else "")
    return ("-gencode", f"arch=compute_{arch},code=sm_{arch}")


def _run(command: list[str], stage: Path, deadline_s: float) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with a deadline that also ends the compiler's own children, which outlive their driver.

    The compiler's temporary files are in the staging folder, which is removed even if the compiler is killed.
    """
    environment = {**os.environ, "TMPDIR": os.fspath(stage)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        out, err = process.communicate(timeout=deadline_s)
    except BaseException:
        for pid in (process.pid, *procs.children(process.pid)):
            procs.send(pid, signal.SIGKILL)
        process.communicate(timeout=60)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def library(
    name: str,
    target: str,
    *,
    capability: tuple[int, int] | None = None,
    source: str | None = None,
    extra: tuple[str, ...] = (),
    cache: Path | None = None,
    deadline_s: float = COMPILE_DEADLINE_S,
) -> Path:
    """The compiled library of a kernel file, built if it does not exist. Beside it, `log` has the compiler's output.

    Args:
        name: file in `csrc`, without `.cu` or `.cpp`.
        target: `cuda`, `emulated` or `cpu`.
        capability: compute capability of the GPU; default that of the current one.
        source: text to compile in place of the file's: a learner's version of it.
        extra: further flags.
        cache: folder, default `cache_folder()`.
        deadline_s: longest time for a compiler, and for another process that has the lock.

    Raises:
        KernelsUnavailable: no compiler, no writable folder, or the compiler's own message.
        DeadlineError: another process has been building for longer than the deadline.
    """
    if target == "cpu" and source is None and not extra and (there := came_along(name)) is not None:
        return there
    program = compiler(target)
    if program is None:
        wanted, fix = ("nvcc", toolkit.FIX) if target == "cuda" else ("g++ or clang++", "install g++ or clang++")
        raise KernelsUnavailable(f"no {wanted} on this machine", where=f"kernel {name}", fix=fix)
    flags: tuple[str, ...] = CPU_FLAGS if target == "cpu" else EMULATED_FLAGS
    if target == "cuda":
        capability = capability or torch.cuda.get_device_capability()
        toolkit.check_knows(program, compiler_version(program), capability)
        flags = (*CUDA_FLAGS, *toolkit.beside(program), *gencode(capability))
    text = source_of(name, target) if source is None else source
    key = _key(text, program, (*flags, *extra, cpu_instructions() if target == "cpu" else ""))
    folder = (cache or cache_folder()) / f"{name}-{target}-{key}"
    try:
        build_once(
            os.fspath(folder),
            lambda stage: _compile(text, name, [program, *flags, *extra], Path(stage), deadline_s),
            lambda path: os.path.isfile(os.path.join(path, "lib.so")),
            deadline_s,
        )
    except (DataError, OSError) as error:
        raise KernelsUnavailable(
            f"cannot write the kernel cache: {error.what if isinstance(error, DataError) else error}",
            where=os.fspath(folder.parent),
            fix="set MINIMEGATRON_KERNEL_CACHE to a folder that this user may write to",
        ) from error
    return folder / "lib.so"


def _key(text: str, program: str, flags: tuple[str, ...]) -> str:
    headers = [path.read_text() for path in sorted(CSRC.glob("*.h"))]
    parts = [text, *headers, compiler_version(program), *flags, torch.__version__, str(torch.version.cuda)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(text: str, name: str, command: list[str], stage: Path, deadline_s: float) -> None:
    """Run the compiler in the staging folder. Its output has a name of this process, because the compiler of a builder
    that was killed may still be writing."""
    source, output = stage / f"{name}.cu", stage / f"{os.getpid()}.so"
    source.write_text(text)
    try:
        done = _run([*command, f"-I{CSRC}", os.fspath(source), "-o", os.fspath(output)], stage, deadline_s)
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(
            f"{command[0]} took longer than {deadline_s:g} s", where=f"{name}.cu", fix="wait, or give it more time"
        ) from error
    if done.returncode:
        first = [line for line in done.stderr.splitlines() if "error" in line][:8] or done.stderr.splitlines()[-8:]
        raise KernelsUnavailable("the compiler refused it:\n" + "\n".join(first), where=f"{name}.cu", fix="mend it")
    (stage / "log").write_text(done.stdout + done.stderr)
    os.rename(output, stage / "lib.so")


def main() -> None:
    """Build the kernels for this CPU, two at a time. Where there is no compiler, say so: torch will compute."""
    from concurrent.futures import ThreadPoolExecutor

    from minimegatron.bars import tqdm

    names = [name for name in sources("cpp") if came_along(name) is None]
    try:
        with ThreadPoolExecutor(2) as pool:
            for _ in tqdm(pool.map(lambda name: library(name, "cpu"), names), "kernels for this CPU", len(names)):
                pass
    except KernelsUnavailable as error:
        print(error)


if __name__ == "__main__":
    main()
