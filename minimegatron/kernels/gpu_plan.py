"""What has to be done to get Transformer Engine and flash-attn on this machine: facts in, commands and variables out.

The problem in a sentence: both packages are compiled against the torch that is installed, each reads a dozen variables
while it does, and their defaults compile for every GPU there is and look for headers where pip does not put them.

| variable                       | value                                   | without it                               |
|--------------------------------|-----------------------------------------|------------------------------------------|
| `FLASH_ATTN_CUDA_ARCHS`        | this GPU's generation: 80, 90, 100, 120 | all four are compiled: four times as long |
| `TORCH_CUDA_ARCH_LIST`, `NVTE_CUDA_ARCHS` | this GPU's capability        | the same                                 |
| `MAX_JOBS`                     | memory / 9 GB, at most the cores        | memory runs out, compilers are killed    |
| `CPATH`                        | headers of cuDNN and NCCL from pip      | `cudnn.h`, `nccl.h`: no such file        |
| `NVTE_BUILD_USE_NVIDIA_WHEELS` | 1                                       | only the toolkit's headers are looked at |
| `CUDA_HOME`                    | the toolkit of the nvcc that was found  | another one, or none                     |
| `NVTE_FRAMEWORK`               | pytorch                                 | it looks for JAX too                     |

What is there already stays (an NGC image brings both). Each package is tried first as a wheel, which takes seconds
where there is one, then built; each on its own, so that one that fails does not stop the other. 9 GB is what
flash-attn's `setup.py` reckons for a job.

Nothing here reads or changes the machine: `gpu_setup.py` does, and tests give it the facts of other machines.
"""

from __future__ import annotations

import dataclasses
from typing import Any

GB_A_JOB = 9
GENERATIONS = (80, 90, 100, 120)  # what flash-attn can be compiled for
TOOLS = ("setuptools", "wheel", "packaging", "ninja", "psutil", "pybind11")
# Minutes of one core to build for one GPU. flash-attn's README says 3 to 5 minutes on 64 cores for all four; the other
# number is a guess. Neither has been measured here.
CORE_MINUTES = {"flash-attn": 75, "transformer-engine": 30}


@dataclasses.dataclass(frozen=True)
class Facts:
    """A machine, as far as it matters here.

    Attributes:
        gpus: names.
        capability: of the first GPU, such as (9, 0); None where nvidia-smi does not say.
        torch: version; None without torch.
        cuda: torch's CUDA release, such as "13.0"; None for a CPU build.
        python: version.
        nvcc: path of the compiler, or None.
        nvcc_release: such as "13.0", or None.
        cuda_home: its toolkit, if its headers are there.
        cores, free_gb: what may be used.
        installed: package -> version, of `transformer-engine` and `flash-attn`.
        headers: folders of pip's packages that hold `cudnn.h` and `nccl.h`.
        wanted: package -> version that constraints.txt pins.
    """

    gpus: tuple[str, ...]
    capability: tuple[int, int] | None
    torch: str | None
    cuda: str | None
    python: str
    nvcc: str | None
    nvcc_release: str | None
    cuda_home: str | None
    cores: int
    free_gb: float
    installed: dict[str, str]
    headers: tuple[str, ...]
    wanted: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Step:
    """One package.

    Attributes:
        package: its name.
        commands: tried in this order until one succeeds.
        needs_compiler: whether the last of them compiles.
        minutes: about how long that takes here.
    """

    package: str
    commands: tuple[tuple[str, ...], ...]
    needs_compiler: bool
    minutes: int


def key(facts: Facts) -> dict[str, Any]:
    """What a result depends on: a second try with the same key would end the same way."""
    names = ("gpus", "torch", "cuda", "python", "nvcc", "nvcc_release", "wanted")
    values = {name: getattr(facts, name) for name in names}
    return values | {"gpus": list(facts.gpus)}


def obstacle(facts: Facts) -> str | None:
    """Why nothing can be installed at all, with what to do; None where nothing is in the way."""
    if not facts.gpus:
        return "nvidia-smi lists no GPU here; both packages are of use on a GPU only"
    if facts.torch is None:
        return "torch is not installed: make lab does it"
    if facts.cuda is None:
        return f"torch {facts.torch} is a build without CUDA: install a CUDA build first (docs/gpu.md)"
    return None


def jobs(facts: Facts) -> int:
    """Compilers at once: as many as memory holds, and cores there are."""
    return max(1, min(facts.cores, int(facts.free_gb // GB_A_JOB)))


def generation(capability: tuple[int, int]) -> int:
    """The newest generation that flash-attn compiles for and this GPU runs: 90 for 9.0, 80 for 8.9."""
    return max((g for g in GENERATIONS if g // 10 <= capability[0]), default=GENERATIONS[0])


def environment(facts: Facts, before: str = "") -> dict[str, str]:
    """Variables to set for the builds; `before` is CPATH as it is."""
    found = {"MAX_JOBS": str(jobs(facts)), "NVTE_FRAMEWORK": "pytorch", "NVTE_BUILD_USE_NVIDIA_WHEELS": "1"}
    if facts.capability is not None:
        major, minor = facts.capability
        found["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
        found["NVTE_CUDA_ARCHS"] = f"{major}{minor}"
        found["FLASH_ATTN_CUDA_ARCHS"] = str(generation(facts.capability))
    if facts.cuda_home is not None:
        found["CUDA_HOME"] = facts.cuda_home
    if facts.headers:
        found["CPATH"] = ":".join((*facts.headers, *([before] if before else [])))
    return found


def plan(facts: Facts, python: str, constraints: str) -> list[Step]:
    """What to run for each package that is missing.

    Args:
        facts: of the machine.
        python: whose environment receives them.
        constraints: path of the file of versions.
    """
    core = f"core_cu{(facts.cuda or '').split('.')[0]}"
    names = {"transformer-engine": f"transformer-engine[{core},pytorch]", "flash-attn": "flash-attn"}
    pip = (python, "-m", "pip", "install", "--no-compile", "--constraint", constraints)
    steps = []
    for package, wanted in names.items():
        if package in facts.installed:
            continue
        commands = [(*pip, "--only-binary=:all:", wanted)]
        if facts.nvcc is not None:
            commands.append((*pip, "--no-build-isolation", wanted))
        minutes = max(1, round(CORE_MINUTES[package] / jobs(facts)))
        steps.append(Step(package, tuple(commands), facts.nvcc is not None, minutes))
    if steps and facts.nvcc is not None:
        steps.insert(0, Step("build tools", ((*pip, *TOOLS),), False, 1))
    return steps


def announce(facts: Facts, steps: list[Step], variables: dict[str, str]) -> str:
    """What will happen, before it does."""
    lines = [f"{name} {version} is here already and stays" for name, version in facts.installed.items()]
    for step in steps:
        if step.needs_compiler:
            then = f"a wheel if there is one, else built with {jobs(facts)} jobs: about {step.minutes} minutes, a guess"
        elif step.package in CORE_MINUTES:
            then = "a wheel if there is one; it cannot be built, there is no nvcc"
        else:
            then = "what the builds need, from wheels"
        lines.append(f"{step.package}: {then}")
    if any(step.needs_compiler for step in steps):
        lines += [f"  {name}={value}" for name, value in sorted(variables.items())]
    return "\n".join(lines)
