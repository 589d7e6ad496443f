"""One GPU, one call, under ten minutes: is it right, how fast is it, what share of this machine is that?

    python -m benchmarks.gpu                 everything; needs torch and one GPU, no network
    python -m benchmarks.gpu --smoke         tiny sizes, on the CPU where there is no GPU: does the script itself work?

In this order, what is worth most first:

1. *The machine.* Copy bandwidth and the bf16 matrix rate, measured here and now: every share below is of these.
2. *Right?* Each layer, forward and backward, in fp32 and bf16 on the device against fp64 on the CPU with the same
   weights and inputs (`benchmarks/gpu_layers.py`); each fused kernel likewise, just before it is timed: a wrong one is
   not timed.
3. *How fast?* Whole training steps of a 1.2 B-parameter Llama in bf16, by torch alone, in FP8 and as one CUDA graph
   (`benchmarks/gpu_training.py`); fused kernels beside torch and, where it is installed, Liger
   (`benchmarks/gpu_kernels.py`); decoding one token after the other (`benchmarks/gpu_decode.py`); layers at sizes well
   beyond the L2 cache; collectives, where there are two GPUs (`benchmarks/gpu_collectives.py`).
4. *Beside torch.compile*, whose compiling takes longest.

Each part runs in a process of its own (`benchmarks/gpu_parts.py`): one that fails leaves the others their rows, and the
run ends with status 1. A row is printed when it is known, and is then in `gpu.json` and in `gpu.md` (rows for
RECORDS.md). A part begins when `--seconds` leave it the time that it needs.

MFU counts model FLOPs with the causal half of attention against the dense bf16 peak (`training/flops.py`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks import gpu_collectives, gpu_decode, gpu_kernels, gpu_layers, gpu_training
from benchmarks.gpu_cases import Case
from benchmarks.gpu_parts import Found, Part, Row, Yielded, elsewhere, play_all
from minimegatron.cuda_graphs import CudaRecorder
from minimegatron.kernels import build
from minimegatron.models.families import family_config

AHEAD = 4_000_000  # cycles that the GPU is kept busy for, so that the host is ahead of it when the clock starts: 2 ms
LAYERS = "layers, right?"


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of a call, after a quarter as many that are not counted.

    On a GPU the host has a start of 2 ms (`AHEAD`): what is shorter is timed without Python, and what Python holds up
    for longer comes out by at most that much too short.
    """
    times = []
    for i in range(-(repeats // 4 + 1), repeats):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(AHEAD)
            begin.record()
            run()
            end.record()
            end.synchronize()
            taken = begin.elapsed_time(end)
        else:
            begun = time.perf_counter()
            run()
            taken = 1e3 * (time.perf_counter() - begun)
        if i >= 0:
            times.append(taken)
    return statistics.median(times)


# ---------------------------------------------------------------------------------------------------- the parts


def machine(device: torch.device, smoke: bool) -> Iterator[Yielded]:
    """Copy bandwidth (bytes read and written) and bf16 matrix rate."""
    facts = {"device": "CPU", "torch": torch.__version__, "gpus": 0}
    if device.type == "cuda":
        facts |= {"device": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
        facts["torch"] += f", CUDA {torch.version.cuda}"
    yield facts
    yield f"{facts['device']}, torch {facts['torch']}"
    x = torch.empty(2**20 if smoke else 2**30, dtype=torch.bfloat16, device=device)
    y, n = torch.empty_like(x), 256 if smoke else 8192
    took = milliseconds(lambda: y.copy_(x), device, 20)
    yield Row(gpu_layers.COPY, took, 2 * x.nbytes / took / 1e6, "GB/s")
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    took = milliseconds(lambda: a @ b, device, 20)
    yield Row(gpu_layers.PRODUCT, took, 2 * n**3 / took / 1e9, "TFLOP/s")


def build_kernels() -> Iterator[Yielded]:
    """Every kernel file by nvcc, all at once: one after the other they take twice as long as the slowest.

    Raises:
        RuntimeError: after all of them, with the first lines of those that could not be built.
    """
    failed, begun = [], time.monotonic()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        names = {pool.submit(build.library, name, "cuda"): name for name in build.sources()}
        for future in concurrent.futures.as_completed(names):
            if error := future.exception():
                failed.append(f"{names[future]}: {error}".splitlines()[0])
            else:
                yield f"{names[future]} after {time.monotonic() - begun:.0f} s"
    if failed:
        raise RuntimeError("; ".join(failed))


def kernel(case: Case, device: torch.device, smoke: bool, found: Found) -> Iterator[Yielded]:
    """One fused kernel: right? then how fast?

    Raises:
        RuntimeError: it is wrong, and was not timed.
    """
    wrong = []
    for name, dtype, error, tolerance in gpu_kernels.check(case, device):
        wrong += [] if error <= tolerance else [dtype]
        yield f"{'kernel: ' + name:<34}{dtype:<10}error {error:.1e}{'' if error <= tolerance else '  WRONG'}"
    if wrong:
        raise RuntimeError(f"WRONG: {case.name} in {' and '.join(wrong)}")
    yield from gpu_kernels.time_case(case, device, smoke, milliseconds, found)


def beside_compiled(device: torch.device, smoke: bool, found: Found) -> Iterator[Yielded]:
    """The kernels that were right, beside what torch.compile makes of the same."""
    for case in gpu_kernels.cases():
        if f"{case.name}, forward" in found.rows:
            yield from gpu_kernels.time_case(case, device, smoke, milliseconds, found, compiled=True)


def collectives(smoke: bool, found: Found) -> Iterator[Yielded]:
    """Between all GPUs of this machine."""
    sizes = {"4 KiB": 1 << 12} if smoke else gpu_collectives.SIZES
    with tempfile.TemporaryDirectory() as folder:
        yield from gpu_collectives.measure(found.facts["gpus"], Path(folder), sizes)


def profile_step(device: torch.device, smoke: bool) -> Iterator[Yielded]:
    """Where a training step spends its time, as a table."""
    sizes = gpu_training.TINY if smoke else gpu_training.LLAMA_1B
    training = gpu_training.Training(family_config("llama", **sizes, params_dtype="bf16"), device)
    step = training.step(2, 64 if smoke else 4096, 2)
    step()
    with torch.profiler.profile() as profiler:
        step()
    order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    yield profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=70)


def plan(device: torch.device, smoke: bool, profile: bool) -> list[Part]:
    """Everything, what is worth most first. Seconds that a part needs are estimates for one H100 and 16 cores."""
    two = (device, smoke)
    timed = (*two, milliseconds)
    recorders = (lambda: CudaRecorder(device)) if device.type == "cuda" else None

    def training(way: str, needs: float = 35.0, limit: float = 90.0) -> Part:
        run = functools.partial(gpu_training.measure, way, *timed)
        return Part(f"training, {way}", run, needs, limit, lambda found: gpu_training.why_not(way, device))

    def decoding(name: str, compiled: bool, needs: float, limit: float) -> Part:
        run = functools.partial(gpu_decode.measure, *timed, recorders, compiled)
        return Part(name, run, needs, limit, lambda found: for_gpus() if compiled else "")

    def for_gpus() -> str:
        return "" if device.type == "cuda" else "it is for GPUs"

    def alone(found: Found) -> str:
        gpus = found.facts.get("gpus", 0)
        return "" if gpus >= 2 else f"they need 2 GPUs, and this machine has {gpus}"

    first, second, *others = (way for way in gpu_training.WAYS if "compile" not in way and "Engine" not in way)
    late = [way for way in gpu_training.WAYS if "compile" in way or "Engine" in way]
    parts = [
        Part("the machine", lambda found: machine(*two)),
        Part("kernels, built", lambda found: build_kernels(), 60, 240, lambda found: "" if not smoke else "smoke run"),
        Part(LAYERS, lambda found: gpu_layers.check_all(device)),
        training(first), training(second),
        *(Part(f"kernel {case.name}", functools.partial(kernel, case, *two)) for case in gpu_kernels.cases()),
        Part("kernel AdamW", functools.partial(gpu_kernels.time_optimizer, *timed)),
        Part("kernel FP8 cast", functools.partial(gpu_kernels.time_fp8, *timed)),
        Part("kernel FP8 linear", functools.partial(gpu_kernels.time_fp8_linear, *timed)),
        *(training(way) for way in others),
        decoding("decoding", False, 30, 90),
        Part("layers", functools.partial(gpu_layers.time_layers, *timed), 20),
        Part("collectives", functools.partial(collectives, smoke), 30, 90, alone),
        *(training(way, 60, 150) for way in late),
        Part("kernels beside torch.compile", functools.partial(beside_compiled, *two), 40, 150, lambda _: for_gpus()),
        decoding("decoding, compiled", True, 60, 150),
    ]  # fmt: skip
    parts += [Part("profile", lambda found: profile_step(*two), 20)] if profile else []
    # A smoke run may be on any machine, beside anything: it takes the time that it takes.
    return [dataclasses.replace(part, needs=0.0, limit=1200.0) for part in parts] if smoke else parts


# ---------------------------------------------------------------------------------------------------- the report


def commit() -> str:
    """Of the checkout that this file is in; "-" outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "-"


def write(found: Found, folder: Path, of: str, command: str) -> None:
    """Both files, each replaced by one that is whole."""
    rows = [dataclasses.asdict(row) for row in found.rows.values()]
    said = {"commit": of, "command": command, **found.facts, "failed": found.failed, "left_out": found.left_out}
    doubt = "; layers were WRONG in this run" if LAYERS in found.failed else ""
    device = f"{found.facts.get('device', '?')}, torch {found.facts.get('torch', '?')}"
    begin = f"| {datetime.date.today()} | {of} | {device} | 1 process |"
    lines = [f"{begin} {row.what} | {row.figure()}{doubt} | `{command}` |" for row in found.rows.values()]
    for name, text in {"gpu.json": json.dumps({**said, "rows": rows}, indent=1), "gpu.md": "\n".join(lines)}.items():
        partial = folder / f".{name}"
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, folder / name)


def main() -> int:
    """The call. Returns the exit status."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on the CPU where there is no GPU")
    parser.add_argument("--profile", action="store_true", help="also print where a training step spends its time")
    parser.add_argument("--only", metavar="WORD", default="", help="only the machine and parts with this in their name")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path("runs/gpu"), help="default runs/gpu")
    parser.add_argument("--seconds", type=float, default=480, help="begin nothing that would take longer; default 480")
    args = parser.parse_args()
    on_gpu = elsewhere(torch.cuda.is_available)
    if not args.smoke and not on_gpu:
        parser.error("no GPU here; --smoke runs tiny sizes on the CPU")
    parts = plan(torch.device("cuda:0" if on_gpu else "cpu"), args.smoke, args.profile)
    parts = [part for part in parts if args.only in part.name or part is parts[0]]
    args.out.mkdir(parents=True, exist_ok=True)
    found, of = Found(), commit()
    words = ["python -m benchmarks.gpu", *["--smoke"] * args.smoke, *[f"--only '{args.only}'"] * bool(args.only)]

    def keep() -> None:
        write(found, args.out, of, " ".join(words))

    def say(line: str) -> None:
        print(line, flush=True)

    play_all(
        parts, found,
        lambda: args.seconds - (time.monotonic() - begun), say, keep,
    )  # fmt: skip
    keep()
    say(f"{len(found.rows)} rows after {time.monotonic() - begun:.0f} s, in {args.out / 'gpu.json'} and gpu.md")
    for name, reason in found.failed.items():
        say(f"FAILED: {name}: {reason}")
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main())
