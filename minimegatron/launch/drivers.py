"""NVIDIA drivers, and which builds of torch they run. Imports no torch, so it can say why torch sees no GPU.

The problem in a sentence: a build of torch brings CUDA with it and needs a driver that is new enough; with an older one
it sees no GPU, computes on the CPU, and says nothing.

| CUDA of torch's build | driver at least | such builds         |
|-----------------------|-----------------|---------------------|
| 13.x                  | 580             | cu130               |
| 12.x                  | 525.60.13       | cu126, cu128, cu129 |
| 11.x                  | 450.80.02       | before torch 2.11   |

NVIDIA, "CUDA Toolkit Release Notes", table of minimum driver versions for minor version compatibility.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

NEEDS = {11: "450.80.02", 12: "525.60.13", 13: "580"}  # CUDA's major version -> the first driver that runs it
HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that mean none


def output_of(command: Sequence[str], seconds: float = 20.0) -> str:
    """Standard output of a command, or "" when it is absent, fails, or takes longer than `seconds`."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def nvidia_smi() -> list[str]:
    """`name, memory, driver` of every NVIDIA GPU, as the driver's own tool lists them; no CUDA context is made."""
    # It fails where no driver is loaded: then there is no GPU to use.
    listing = output_of(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    return [line.strip() for line in listing.splitlines() if line.strip()]


def obstacle(gpus: Sequence[str], version: str, cuda: str | None, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """(Why torch can use none of the GPUs that `nvidia-smi` lists, the fix); None if it lists none, or if they are
    hidden.

    Args:
        gpus: lines of `nvidia_smi`.
        version, cuda: versions of torch and of the CUDA that it was built with (None: a CPU build).
    """
    if not gpus or hidden(environ):
        return None
    driver = gpus[0].rpartition(",")[2].strip()
    listed = f"nvidia-smi lists {len(gpus)} GPU{'s'[: len(gpus) > 1]} with driver {driver}"
    if cuda is None:
        return f"{listed}, and torch {version} is no build for CUDA", f"install {build_for(driver, version)}"
    needs = NEEDS.get(int(cuda.split(".")[0]))
    if needs is not None and _numbers(driver) and _numbers(driver) < _numbers(needs):
        others = f"a driver of {needs} or newer, or NVIDIA's cuda-compat of CUDA {cuda} (data-centre GPUs)"
        built = f"{build_for(driver, version)}, or " if _numbers(driver) >= _numbers(NEEDS[12]) else ""
        return (
            f"{listed}; torch {version} is built for CUDA {cuda}, which needs driver {needs} or newer",
            f"install {built}{others}",
        )
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"{listed}, and CUDA_VISIBLE_DEVICES={visible} names none of them", "unset it, or name one of them"
    return f"{listed}, new enough for torch {version}, which sees none", "python -c 'import torch; torch.cuda.init()'"


def build_for(driver: str, version: str) -> str:
    """The build of torch that a driver runs, in words; docs/gpu.md has the command.

    Without the suffix pip accepts any installed build of that version, and does not replace it.
    """
    plain = version.partition("+")[0]
    if _numbers(driver) >= _numbers(NEEDS[13]):
        return f"torch=={plain}+cu130, or +cu126 (docs/gpu.md, Driver and torch)"
    if _numbers(driver) >= _numbers(NEEDS[12]):
        return f"torch=={plain}+cu126, or another build for CUDA 12 (docs/gpu.md, Driver and torch)"
    return f"a driver of {NEEDS[12]} or newer (no build of torch 2.11 or later runs on {driver})"


def hidden(environ: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides all GPUs."""
    return environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in HIDDEN


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
