"""Kernels for CPUs that a wheel brings along, for machines without a compiler.

The problem in a sentence: `build` compiles for this CPU with all its instructions, which a library that travels may not
have, and somebody who has no compiler has torch's operations instead, a sixth slower in training.

    minimegatron/kernels/prebuilt/x86-64-v4/norm-<hash>.so      for CPUs with AVX-512
    minimegatron/kernels/prebuilt/x86-64-v3/norm-<hash>.so      with AVX2 and fused multiply-add

`pip wheel .` compiles a library for each of these levels of the x86-64 ABI where there is a compiler (`setup.py`), and
without one a wheel has none. An editable install has none either: where the source is, `build` compiles it on first
use. `found` takes the highest level that the CPU has. The hash is that of the source and its headers, so a file that
was edited after it was built is compiled anew.

On other processors nothing is prebuilt. This module imports nothing of the package, since `setup.py` runs it.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path

CSRC, FOLDER = Path(__file__).parent / "csrc", Path(__file__).parent / "prebuilt"
FLAGS = (
    "-x", "c++", "-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math",
    "-fvisibility=hidden", "-pthread", "-Wall", "-Wno-unknown-pragmas",
)  # fmt: skip
TRAVELS = ("-static-libstdc++", "-static-libgcc", "-s")  # it needs the C library alone
# Level -> instructions, as Linux names them; the best first.
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}


def compiler() -> str | None:
    """Path of the C++ compiler, None when there is none."""
    return shutil.which("g++") or shutil.which("clang++")


def can_build() -> bool:
    """Whether libraries can be built for other machines: on Linux, x86-64, with a compiler."""
    return platform.system() == "Linux" and platform.machine() == "x86_64" and compiler() is not None


def place(name: str, level: str, folder: Path = FOLDER) -> Path:
    """Where the library of a kernel file is for this level, if it has been built."""
    text = [(CSRC / f"{name}.cpp").read_bytes(), *(path.read_bytes() for path in sorted(CSRC.glob("*.h")))]
    return folder / level / f"{name}-{hashlib.sha256(b''.join(text)).hexdigest()[:12]}.so"


def levels(instructions: Collection[str]) -> list[str]:
    """The levels of a CPU with these instructions, the best first; each contains those after it."""
    below = [set[str]().union(*list(LEVELS.values())[i:]) for i in range(len(LEVELS))]
    return [level for level, needed in zip(LEVELS, below, strict=True) if needed <= set(instructions)]


def found(name: str, instructions: Collection[str], folder: Path = FOLDER) -> Path | None:
    """The prebuilt library of a kernel file for a CPU with these instructions; None if there is none."""
    if not folder.is_dir():
        return None
    places = (place(name, level, folder) for level in levels(instructions))
    return next((path for path in places if path.is_file()), None)


def build(folder: Path, names: Collection[str] | None = None, wanted: Collection[str] = tuple(LEVELS)) -> None:
    """Compile kernel files for these levels into `folder`; default all.

    Raises:
        subprocess.SubprocessError: the compiler refused one and has printed why, or took longer than ten minutes.
    """
    program = compiler()
    assert program is not None, "can_build() comes first"
    for name in names or sorted(path.stem for path in CSRC.glob("*.cpp")):
        for level in wanted:
            path = place(name, level, folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            print(f"compiling {name}.cpp for {level}", flush=True)
            command = [program, *FLAGS, f"-march={level}", *TRAVELS, f"-I{CSRC}", str(CSRC / f"{name}.cpp")]
            subprocess.run([*command, "-o", str(path)], check=True, timeout=600)
