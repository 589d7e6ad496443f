"""`minimegatron doctor`: what this machine can do, how each feature runs on it, and what to install for the rest.

`examine` collects facts, `ways` derives how each feature runs here, `advice` what is missing and how to get it. The
core is tried, not assumed: a product and its gradient, and an all-reduce in a gloo group of one rank, which fails where
the machine cannot resolve or reach itself.

    minimegatron doctor            # exit status 0 when the core works, else 1
    minimegatron doctor --json     # the facts, for scripts and bug reports
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import minimegatron
from minimegatron.commands import installed
from minimegatron.flags import Parser
from minimegatron.kernels import toolkit
from minimegatron.launch.drivers import nvidia_smi, obstacle, output_of
from minimegatron.launch.procs import limits, usable_cores

Facts = dict[str, Any]
PACKAGES = ("jupyterlab", "matplotlib", "nbval", "transformers", "megatron-core", "transformer-engine", "flash-attn")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH = 80


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns 0 when the core works."""
    parser = Parser("minimegatron doctor", description="what this machine can do")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    args = parser.parse_args(argv)
    facts = examine()
    if args.json:
        print(json.dumps({"facts": facts, "ways": dict(ways(facts)), "advice": dict(advice(facts))}, indent=2))
    else:
        print(report(facts))
    return 1 if facts["broken"] else 0


# ------------------------------------------------------------------------------------------------------ facts


def examine() -> Facts:
    """All facts of the report, as plain data; `broken` lists what prevents the core from working."""
    facts: Facts = {
        "minimegatron": minimegatron.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": nvidia_smi(),
        "nvcc": nvcc_version(),
        "browser": next((name for name in BROWSERS if shutil.which(name)), None),
        "packages": {name: _version(name) for name in PACKAGES},
        "limits": limits(),
        "kernels": None,
        "kernels_in_wheel": False,
        "attention": None,
        "broken": [],
    }
    try:
        facts["torch"] = examine_torch(facts["gpus"])
    except Exception as error:  # the doctor's work is to say what is wrong, whatever it is
        facts["torch"] = None
        facts["broken"].append(f"torch: {type(error).__name__}: {error}")
        return facts
    facts["kernels"], facts["kernels_in_wheel"] = examine_kernels(), kernels_in_wheel()
    facts["attention"] = examine_attention(bool(facts["torch"]["gpus"]))
    for name, check in (("autograd", check_autograd), ("gloo", check_gloo)):
        try:
            check()
        except Exception as error:
            facts["broken"].append(f"{name}: {type(error).__name__}: {error}")
    return facts


def nvcc_version() -> str | None:
    """The CUDA compiler's release and where it comes from, or None without one."""
    found = toolkit.nvcc()
    release = toolkit.release(output_of((found.path, "--version"), seconds=5)) if found else None
    return f"{release[0]}.{release[1]}, from {found.origin}: {found.path}" if found and release else None


def examine_torch(gpus: list[str]) -> Facts:
    """Version and build of torch; if the machine has a GPU, also whether torch can use it, and if not, why."""
    import torch
    import torch.distributed as dist

    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    else:
        build = f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"
    with warnings.catch_warnings():  # torch's own words about a driver; `obstacle` has the better ones
        warnings.simplefilter("ignore")
        seen = torch.cuda.device_count() if torch.version.cuda and torch.cuda.is_available() else 0
    nccl = dist.is_available() and dist.is_nccl_available()
    reason = None if seen else obstacle(gpus, torch.__version__, torch.version.cuda, os.environ)
    return {"version": torch.__version__, "build": build, "gpus": seen, "nccl": nccl, "obstacle": reason}


def kernels_in_wheel() -> bool:
    """Whether the wheel brought every kernel for this CPU, compiled."""
    from minimegatron.kernels import build, prebuilt

    return all(build.came_along(path.stem) for path in prebuilt.CSRC.glob("*.cpp"))


def examine_kernels() -> Facts:
    """What prevents this machine from building kernels, for each of the ways to run them; None if nothing does."""
    from minimegatron.kernels.choice import obstacle

    return {target: obstacle(target) for target in ("cuda", "emulated", "cpu")}


def examine_attention(gpu: bool) -> str:
    """The default backend of attention, in words."""
    import torch

    from minimegatron.layers.attention.choice import in_words, this_machine

    return in_words(this_machine(torch.device("cuda", 0) if gpu else torch.device("cpu")))


def check_autograd() -> None:
    """A product and its gradient."""
    import torch

    x = torch.full((2, 2), 3.0, requires_grad=True)
    (x @ x).sum().backward()
    if x.grad is None or x.grad.tolist() != [[12.0, 12.0], [12.0, 12.0]]:
        raise RuntimeError(f"the gradient of sum(x @ x) at x = 3 is {x.grad}, not 12")


def check_gloo() -> None:
    """A group of one rank, and an all-reduce on it."""
    import torch
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=10)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------------------------ conclusions


def ways(facts: Facts) -> list[tuple[str, str]]:
    """(feature, how it runs on this machine)."""
    if facts["torch"] is None:
        return []
    cores, seen, packages = facts["cores"], facts["torch"]["gpus"], facts["packages"]
    if seen and facts["torch"]["nccl"]:
        ranks = (
            f"NCCL, one GPU a rank: torchrun --nproc-per-node {seen}; more ranks than that: --distributed-backend gloo"
        )
        precision = "fp32, bf16, fp16 on the GPU"
    else:
        ranks = f"gloo on the CPU: torchrun --nproc-per-node {cores} uses every core; more ranks take turns"
        if facts["torch"]["obstacle"]:
            ranks = "train stops and says why, see below; --distributed-backend gloo trains on the CPU"
        precision = "fp32; bf16 and fp16 run too, to learn with, not for speed"
    obstacles = facts["kernels"]
    if seen:
        fused = f"torch's: {obstacles['cuda']}" if obstacles["cuda"] else "CUDA, built when first used"
    else:
        made = "compiled in the wheel" if facts["kernels_in_wheel"] else "built when first used"
        own = f"torch's: {obstacles['cpu']}" if obstacles["cpu"] else f"for CPUs, {made}"
        fused = f"{own}; CUDA's emulated to learn with: {obstacles['emulated'] or 'kernels=emulated'}"
    labs = (
        f"JupyterLab: {'minimegatron' if installed.from_wheel() else 'make'} lab"
        if packages["jupyterlab"]
        else "not installed"
    )
    oracles = [name for name in ("transformers", "megatron-core") if packages[name]]
    tests = "make test" if packages["nbval"] else "not installed; make test does it"
    if installed.from_wheel():
        tests = "they come with the source, not with a wheel"
    return [
        ("ranks", ranks),
        ("ends of ranks", "; ".join(facts["limits"]) or "a job leaves no process behind, however it ends"),
        ("precision", precision),
        ("attention", facts["attention"]),
        ("kernels", fused),
        ("labs", labs),
        ("pictures", "matplotlib" if packages["matplotlib"] else "not installed, see below"),
        ("tests", tests + (f", against {' and '.join(oracles)}" if oracles else "")),
    ]


def advice(facts: Facts) -> list[tuple[str, str]]:
    """(What is missing, what to do); without a GPU nothing is asked for that only a GPU can use."""
    packages, torch = facts["packages"], facts["torch"]
    wanted = []
    if torch is None:
        wanted.append(("torch", "pip install --constraint constraints.txt torch, or make lab"))
    if not packages["jupyterlab"] or not packages["matplotlib"]:
        wanted.append(("labs", installed.to_add("lab", "lab")))
    if not packages["nbval"] and not installed.from_wheel():
        wanted.append(("tests", "make test installs what they need"))
    if not facts["browser"] and not installed.from_wheel():
        wanted.append(("browser checks", "install Chromium from your system's packages, then make browser"))
    seen = torch is not None and torch["gpus"]
    if not facts["gpus"] and not seen:
        wanted.append(("GPU", "none found, and none is needed; docs/gpu.md is for a machine that has one"))
        return wanted
    if torch is not None and not seen:
        what, fix = torch["obstacle"] or ("CUDA_VISIBLE_DEVICES hides the GPU", "unset it")
        wanted.append(("torch for the GPU", f"{what}: {fix}"))
    if not facts["nvcc"]:
        wanted.append(("nvcc", toolkit.FIX))
    if not packages["transformer-engine"] or not packages["flash-attn"]:
        wanted.append(("Transformer Engine, flash-attn", "make gpu: it says how long it takes before it begins"))
    return wanted


def report(facts: Facts) -> str:
    """The facts and conclusions in 80 columns."""
    torch, packages = facts["torch"], facts["packages"]
    found = [
        ("minimegatron", facts["minimegatron"]),
        ("Python", f"{facts['python']} on {facts['system']}"),
        ("torch", f"{torch['version']}, {torch['build']} build" if torch else "cannot be used"),
        ("CPU", f"{facts['cores']} core(s), {facts['memory_gib']} GiB of memory"),
        ("GPU", "; ".join(facts["gpus"]) or "none"),
        ("gloo", "works" if torch and not any(b.startswith("gloo") for b in facts["broken"]) else "does not work"),
        ("NCCL", "in this build of torch" if torch and torch["nccl"] else "not in this build of torch"),
        ("nvcc", facts["nvcc"] or "not found"),
        ("browser", facts["browser"] or "no Chromium found"),
        *((name, packages[name] or "not installed") for name in PACKAGES),
    ]
    parts = [("This machine", found), ("How things run here", ways(facts)), ("To get more", advice(facts))]
    if facts["broken"]:
        parts.append(("The core does not work", [("because", problem) for problem in facts["broken"]]))
    lines = []
    for title, rows in parts:
        if rows:
            lines += ["", title, *(line for row in rows for line in _row(*row))]
    return "\n".join([*lines[1:], "", "The core works." if not facts["broken"] else "The core does not work."])


def _row(name: str, text: str) -> list[str]:
    margin = " " * 22
    if len(name) > 18:
        return [f"  {name}", *textwrap.wrap(text, WIDTH, initial_indent=margin, subsequent_indent=margin)]
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {name:<20}", subsequent_indent=margin)
