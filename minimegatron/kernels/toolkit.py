"""Finds nvcc, and knows which GPUs it compiles for.

The problem in a sentence: torch brings CUDA's libraries and no compiler, and a compiler may come from the system, from
a module of the cluster, from conda or from pip, each time to another folder.

| looked up, in this order                                  | installed there by                                    |
|-----------------------------------------------------------|-------------------------------------------------------|
| `$CUDA_HOME/bin`, `$CUDA_PATH/bin`                        | you, or `module load cuda`                            |
| `PATH`                                                    | the system, an NGC image                              |
| `$CONDA_PREFIX/bin`, `bin` beside this Python             | conda: `conda install cuda-nvcc cuda-cudart-dev`      |
| `site-packages/nvidia/cu13/bin`, `.../cuda_nvcc/bin`      | pip: the extra `nvcc` of the package `cuda-toolkit`   |
| `/usr/local/cuda/bin`                                     | NVIDIA's installer                                    |

The compiler's release need not be that of torch's CUDA: kernels are linked with CUDA's runtime inside
(`--cudart=static`) and use only pointers and streams of torch. The driver must not be older than the compiler's major
release, and the compiler must know the GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from minimegatron.errors import ConfigError

FIX = "install one for torch's CUDA version, or set CUDA_HOME to a toolkit that is there (docs/gpu.md)"
# the first release of nvcc that compiles for a GPU, by its compute capability (CUDA's release notes)
FIRST_RELEASE = {(8, 0): (11, 0), (8, 6): (11, 1), (8, 9): (11, 8), (9, 0): (12, 0), (10, 0): (12, 8), (12, 0): (12, 8)}


class KernelsUnavailable(ConfigError):
    """A library cannot be built here: no compiler, no writable folder, or the source does not compile."""


class Nvcc(NamedTuple):
    """A compiler.

    Attributes:
        path: path of the program.
        origin: how it was found, in words.
    """

    path: str
    origin: str


def nvcc(environ: Mapping[str, str] | None = None, system: str = "/usr/local/cuda") -> Nvcc | None:
    """The first nvcc of the table of this module, or None."""
    for path, origin in _places(os.environ if environ is None else environ, system):
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return Nvcc(os.fspath(path), origin)
    return None


def _places(environ: Mapping[str, str], system: str) -> Iterator[tuple[Path | str, str]]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(name):
            yield Path(environ[name], "bin", "nvcc"), name
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    if on_path:
        yield on_path, "PATH"
    if environ.get("CONDA_PREFIX"):
        yield Path(environ["CONDA_PREFIX"], "bin", "nvcc"), "conda"
    yield Path(sys.executable).parent / "nvcc", "beside Python"
    for folder in _site_packages():
        for part in ("cu13", "cuda_nvcc"):
            yield Path(folder, "nvidia", part, "bin", "nvcc"), "pip"
    yield Path(system, "bin", "nvcc"), system


def _site_packages() -> list[str]:
    paths = sysconfig.get_paths()
    return list(dict.fromkeys((paths["purelib"], paths["platlib"])))


def beside(program: str) -> tuple[str, ...]:
    """Flags for the folders that pip's packages have elsewhere than the compiler looks; none for other toolkits."""
    folder = Path(program).parent.parent
    if folder.name == "cu13":  # its profile says lib64, its libraries are in lib
        return (f"-L{folder / 'lib'}",)
    runtime = folder.parent / "cuda_runtime"
    return (f"-I{runtime / 'include'}", f"-L{runtime / 'lib'}") if folder.name == "cuda_nvcc" else ()


def home(program: str) -> str | None:
    """The toolkit's folder (CUDA_HOME); None if the compiler is a wrapper."""
    folder = Path(os.path.realpath(program)).parent.parent
    headers = [path for part in ("", "targets/*/") for path in folder.glob(f"{part}include/cuda_runtime.h")]
    return os.fspath(folder) if headers else None


def check_knows(program: str, said: str, capability: tuple[int, int]) -> None:
    """Refuse a compiler that is older than the GPU.

    Args:
        program: path of nvcc.
        said: its output for `--version`.
        capability: compute capability of the GPU.

    Raises:
        KernelsUnavailable: with both releases, and what to do.
    """
    found = release(said)
    needed = max((first for gpu, first in FIRST_RELEASE.items() if gpu <= capability), default=(0, 0))
    if found is not None and found < needed:
        raise KernelsUnavailable(
            f"nvcc {_dotted(found)} does not know this GPU: compute capability {_dotted(capability)} needs nvcc "
            f"{_dotted(needed)} or newer",
            where=program,
            fix=FIX,
        )


def release(said: str) -> tuple[int, int] | None:
    """(major, minor) from what `nvcc --version` prints; None if it prints no release."""
    found = re.search(r"release (\d+)\.(\d+)", said)
    return None if found is None else (int(found[1]), int(found[2]))


def _dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
