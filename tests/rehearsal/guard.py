"""The guard library (`guard.cpp`): compiled once, kept in the project's cache, found by every later run.

`python -m tests.rehearsal.guard` prints its path. The key of the cache is a hash of the source, the compiler and
torch's version, and one process builds it while others wait (`minimegatron/data/publish.py`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")
DEADLINE_S = 600.0


class NoGuard(Exception):
    """The library cannot be made on this machine; the message says why."""


@functools.cache
def library() -> Path:
    """Path of the compiled library.

    Raises:
        NoGuard: there is no g++, or it refuses torch's headers.
    """
    import torch

    from minimegatron.data.publish import build_once
    from minimegatron.kernels import build

    program = build.compiler("emulated")
    if program is None:
        raise NoGuard("the rehearsal device is compiled by g++ or clang++, and this machine has neither")
    parts = [SOURCE.read_text(), build.compiler_version(program), *FLAGS, torch.__version__, torch.__file__]
    folder = build.cache_folder() / f"rehearsal-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"

    def compile_(stage: str) -> None:
        root, output = Path(torch.__file__).parent, Path(stage, "lib.so")
        include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
        link = [f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"]
        command = [program, *FLAGS, *include, str(SOURCE), "-o", str(output), *link]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode:
            raise NoGuard(f"{program} refused {SOURCE.name}:\n{done.stderr[-2000:]}")

    build_once(os.fspath(folder), compile_, lambda path: os.path.isfile(os.path.join(path, "lib.so")), DEADLINE_S)
    return folder / "lib.so"


_loaded: list[ctypes.CDLL] = []


def load(path: str) -> None:
    """Load the library into this process; before `import torch`, because torch looks for hooks once."""
    assert "torch" not in sys.modules, "the guard library is loaded before torch is imported"
    _loaded.append(ctypes.CDLL(path, ctypes.RTLD_GLOBAL))
    _loaded[0].rehearsal_stream.restype = ctypes.c_int64


def loaded() -> ctypes.CDLL:
    """The library that `load` has loaded."""
    assert _loaded, "this process does not run on the rehearsal device: see tests/rehearsal/boot.py"
    return _loaded[0]


if __name__ == "__main__":
    print(library())
