"""`make gpu`: Transformer Engine and flash-attn, where a machine can have them. It runs when it is asked for.

Everything trains without the two; they are another implementation of linear layers and of attention. What has been
tried is written down with the versions it was tried with, so a second `make gpu` says so at once and compiles nothing;
`make gpu FORCE=1` tries again, and so does any change of torch, Python, nvcc, GPU or pinned version.

    python -m minimegatron.kernels.gpu_setup --stamp .venv/.gpu.json --constraints constraints.txt [--force]

`main` asks the machine (`examine`) and runs steps; what to do is decided by pure functions of the resulting `Facts`. A
build writes to a log beside the stamp, and prints a line every half minute. Exit status 0 when both packages are there,
1 when one is not, 2 when there is nothing to build for.

Both packages are compiled against the torch that is installed, each reads a dozen variables while it is, and their
defaults compile for every GPU there is and look for headers where pip does not put them:

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
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minimegatron.data.publish import publish, read_json, to_json
from minimegatron.errors import ConfigError
from minimegatron.kernels import toolkit
from minimegatron.launch.drivers import output_of
from minimegatron.launch.procs import usable_cores

MODULES = {"transformer-engine": "transformer_engine", "flash-attn": "flash_attn"}
LONGEST_S, PULSE_S = 6 * 3600.0, 30.0
GB_A_JOB = 9
GENERATIONS = (80, 90, 100, 120)  # what flash-attn can be compiled for
TOOLS = ("setuptools", "wheel", "packaging", "ninja", "psutil", "pybind11")
# Minutes of one core to build for one GPU. flash-attn's README says 3 to 5 minutes on 64 cores for all four; the other
# number is a guess. Neither has been measured here.
CORE_MINUTES = {"flash-attn": 75, "transformer-engine": 30}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns 0 when both packages are installed."""
    parser = argparse.ArgumentParser("make gpu", description="Transformer Engine and flash-attn, tried once")
    parser.add_argument("--stamp", type=Path, required=True, help="where is written what was tried")
    parser.add_argument("--constraints", type=Path, required=True, help="file of versions for pip")
    parser.add_argument("--force", action="store_true", help="try again what has been tried")
    parser.add_argument("--pulse", type=float, default=PULSE_S, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    facts = examine(args.constraints)
    reason = obstacle(facts)
    if reason is not None:
        raise ConfigError(f"nothing to build: {reason}", fix="minimegatron doctor says what this machine can do")
    steps = plan(facts, sys.executable, os.fspath(args.constraints))
    before = {} if args.force else earlier(args.stamp, key(facts))
    tried = {package: why for package, why in before.items() if package not in facts.installed}
    left = [step for step in steps if step.package not in tried]
    if tried and not any(step.package in MODULES for step in left):
        print("tried before with the same versions, and not tried again:")
        print("\n".join(f"  {package}: {outcome}" for package, outcome in tried.items()))
        print("make gpu FORCE=1 tries again; everything but these packages works without them")
        return 1
    variables = builds_environment(facts, os.environ.get("CPATH", ""))
    print(announce(facts, left, variables), flush=True)
    failed = dict(tried)
    for step in left:
        outcome = perform(step, variables, args.stamp.parent, args.pulse)
        if outcome is not None and step.package in MODULES:
            failed[step.package] = outcome
        publish(args.stamp, to_json({"key": key(facts), "failed": failed}))  # what Ctrl-C leaves is true
    print(f"not installed: {', '.join(failed)}; all else works without" if failed else "both packages are installed")
    return 1 if failed else 0


def examine(constraints: Path) -> Facts:
    """The facts of this machine."""
    listing = output_of(("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"))
    rows = [line.split(",") for line in listing.splitlines() if line.strip()]
    torch, cuda = _torch()
    compiler = toolkit.nvcc()
    release = toolkit.release(output_of((compiler.path, "--version"))) if compiler else None
    pinned = re.findall(r"^([\w.-]+)==(\S+)", constraints.read_text(), re.MULTILINE)
    capability = re.fullmatch(r"(\d+)\.(\d+)", rows[0][-1].strip()) if rows else None
    return Facts(
        gpus=tuple(row[0].strip() for row in rows),
        capability=(int(capability[1]), int(capability[2])) if capability else None,
        torch=torch,
        cuda=cuda,
        python=platform.python_version(),
        nvcc=compiler.path if compiler else None,
        nvcc_release=f"{release[0]}.{release[1]}" if release else None,
        cuda_home=toolkit.home(compiler.path) if compiler else None,
        cores=usable_cores(),
        free_gb=_free_gb(),
        installed={name: _version(name) for name, module in MODULES.items() if importlib.util.find_spec(module)},
        headers=_headers(),
        wanted={name: version for name, version in pinned if name in MODULES},
    )


def earlier(stamp: Path, key: dict[str, Any]) -> dict[str, str]:
    """{package: why it failed before with these versions}."""
    found = read_json(stamp) if stamp.is_file() else {}
    return dict(found["failed"]) if found.get("key") == key else {}


def perform(step: Step, variables: dict[str, str], folder: Path, pulse: float) -> str | None:
    """Try the commands of a step in order; None when one succeeds, else why not."""
    log = folder / f"gpu-{step.package.replace(' ', '-')}.log"
    print(f"{step.package} (log: {log})", flush=True)
    for attempt, command in enumerate(step.commands):
        start = time.monotonic()
        with open(log, "ab" if attempt else "wb") as file:
            status = _run(command, os.environ | variables, file, pulse)
        minutes = (time.monotonic() - start) / 60
        if status == 0:
            print(f"  installed after {minutes:.1f} minutes", flush=True)
            return None
        print(f"  {'no wheel' if attempt == 0 else 'the build failed'} after {minutes:.1f} minutes", flush=True)
    why = "there is no wheel, and no nvcc to build it" if len(step.commands) == 1 else "it did not build"
    return f"{why}: {log}"


def _run(command: Sequence[str], environ: dict[str, str], file: Any, pulse: float) -> int:
    """Run a command with its output going to a file and a sign of life to the terminal; ends all its processes."""
    process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
    start = time.monotonic()
    try:
        while True:
            try:
                return process.wait(timeout=pulse)
            except subprocess.TimeoutExpired:
                minutes = (time.monotonic() - start) / 60
                print(f"  still at work after {minutes:.1f} minutes", flush=True)
                if minutes * 60 > LONGEST_S:
                    return 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=60)


def _torch() -> tuple[str | None, str | None]:
    """torch's version and CUDA release."""
    try:
        import torch
    except ImportError:
        return None, None
    return str(torch.__version__), torch.version.cuda


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _free_gb() -> float:
    """Free memory; total memory if the system does not say."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(int(found[1]) / 1e6 if found else pages / 1e9, _quota_gb())


def _quota_gb(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Memory that a container or a job may still use; inf if it has no limit of its own."""
    try:
        most, used = ((root / f"memory.{name}").read_text() for name in ("max", "current"))
        return (int(most) - int(used)) / 1e9
    except (OSError, ValueError):  # "max": no limit
        return math.inf


def _headers() -> tuple[str, ...]:
    """Include folders of pip's cuDNN and NCCL, which torch's wheels depend on."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    found = [Path(root, part, "include") for root in roots for part in ("cudnn", "nccl")]
    return tuple(os.fspath(path) for path in found if path.is_dir())


# ------------------------------------------------------------------- the plan: facts in, commands and variables out


@dataclasses.dataclass(frozen=True)
class Facts:
    """The relevant facts of a machine.

    Attributes:
        gpus: names.
        capability: compute capability of the first GPU, such as (9, 0); None if nvidia-smi does not say.
        torch: version; None without torch.
        cuda: torch's CUDA release, such as "13.0"; None for a CPU build.
        python: version.
        nvcc: path of the compiler, or None.
        nvcc_release: such as "13.0", or None.
        cuda_home: its toolkit, if its headers are there.
        cores, free_gb: cores and memory that may be used.
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
    """Everything a result depends on: a second try with the same key would end the same way."""
    names = ("gpus", "torch", "cuda", "python", "nvcc", "nvcc_release", "wanted")
    values = {name: getattr(facts, name) for name in names}
    return values | {"gpus": list(facts.gpus)}


def obstacle(facts: Facts) -> str | None:
    """Why nothing can be installed at all, with what to do; None if something can."""
    if not facts.gpus:
        return "nvidia-smi lists no GPU here; both packages are of use on a GPU only"
    if facts.torch is None:
        return "torch is not installed: make lab does it"
    if facts.cuda is None:
        return f"torch {facts.torch} is a build without CUDA: install a CUDA build first (docs/gpu.md)"
    return None


def jobs(facts: Facts) -> int:
    """Number of parallel compilers: limited by memory and cores."""
    return max(1, min(facts.cores, int(facts.free_gb // GB_A_JOB)))


def generation(capability: tuple[int, int]) -> int:
    """The newest generation that flash-attn compiles for and this GPU runs: 90 for 9.0, 80 for 8.9."""
    return max((g for g in GENERATIONS if g // 10 <= capability[0]), default=GENERATIONS[0])


def builds_environment(facts: Facts, before: str = "") -> dict[str, str]:
    """Variables to set for the builds; `before` is the present value of CPATH."""
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
    """The steps for each package that is missing.

    Args:
        facts: facts of the machine.
        python: the Python whose environment receives them.
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
    """What will be done, in words, before it is done."""
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


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
