"""`make gpu`: Transformer Engine and flash-attn, where a machine can have them. It runs when it is asked for.

Everything trains without the two; they are another implementation of linear layers and of attention. What has been
tried is written down with the versions it was tried with, so a second `make gpu` says so at once and compiles nothing;
`make gpu FORCE=1` tries again, and so does any change of torch, Python, nvcc, GPU or pinned version.

    python -m minimegatron.kernels.gpu_setup --stamp .venv/.gpu.json --constraints constraints.txt [--force]

The decisions are in `gpu_plan.py`. A build writes to a log beside the stamp; a line every half minute says that it is
still at work. Exit status 0 when both packages are there, 1 when one is not, 2 when there is nothing to build for.
"""

from __future__ import annotations

import argparse
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
from minimegatron.kernels import gpu_plan, toolkit
from minimegatron.kernels.gpu_plan import Facts, Step
from minimegatron.launch.output import output_of
from minimegatron.launch.procs import usable_cores

MODULES = {"transformer-engine": "transformer_engine", "flash-attn": "flash_attn"}
LONGEST_S, PULSE_S = 6 * 3600.0, 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns 0 when both packages are installed."""
    parser = argparse.ArgumentParser("make gpu", description="Transformer Engine and flash-attn, tried once")
    parser.add_argument("--stamp", type=Path, required=True, help="where is written what was tried")
    parser.add_argument("--constraints", type=Path, required=True, help="file of versions for pip")
    parser.add_argument("--force", action="store_true", help="try again what has been tried")
    parser.add_argument("--pulse", type=float, default=PULSE_S, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    facts = examine(args.constraints)
    reason = gpu_plan.obstacle(facts)
    if reason is not None:
        raise ConfigError(f"nothing to build: {reason}", fix="minimegatron doctor says what this machine can do")
    steps = gpu_plan.plan(facts, sys.executable, os.fspath(args.constraints))
    before = {} if args.force else earlier(args.stamp, gpu_plan.key(facts))
    tried = {package: why for package, why in before.items() if package not in facts.installed}
    left = [step for step in steps if step.package not in tried]
    if tried and not any(step.package in MODULES for step in left):
        print("tried before with the same versions, and not tried again:")
        print("\n".join(f"  {package}: {outcome}" for package, outcome in tried.items()))
        print("make gpu FORCE=1 tries again; everything but these packages works without them")
        return 1
    variables = gpu_plan.environment(facts, os.environ.get("CPATH", ""))
    print(gpu_plan.announce(facts, left, variables), flush=True)
    failed = dict(tried)
    for step in left:
        outcome = perform(step, variables, args.stamp.parent, args.pulse)
        if outcome is not None and step.package in MODULES:
            failed[step.package] = outcome
        publish(args.stamp, to_json({"key": gpu_plan.key(facts), "failed": failed}))  # what Ctrl-C leaves is true
    print(f"not installed: {', '.join(failed)}; all else works without" if failed else "both packages are installed")
    return 1 if failed else 0


def examine(constraints: Path) -> Facts:
    """This machine's facts."""
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
    """What failed before with these versions: package -> why."""
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
    """Run a command with its words going to a file and a sign of life to the terminal; ends all it started."""
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
    """Memory that may still be used; all there is where the system does not say."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(int(found[1]) / 1e6 if found else pages / 1e9, _quota_gb())


def _quota_gb(root: Path = Path("/sys/fs/cgroup")) -> float:
    """What a container or a job may still take; inf where it has no limit of its own."""
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


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
