"""One GPU, one call, under ten minutes: is it right, how fast is it, what share of this machine is that?

    python -m benchmarks.gpu                 everything; needs torch and one GPU, no network
    python -m benchmarks.gpu --smoke         tiny sizes on the CPU: does the script itself work?

In this order, so that nothing wrong is ever timed:

1. *The machine.* Copy bandwidth and the bf16 matrix rate, measured here and now: every share below is of these.
2. *Right?* Each layer and each fused kernel, forward and backward, in fp32 and bf16 on the device against fp64 on the
   CPU with the same weights and inputs. A failed check ends the run with status 1. A smoke run emulates the kernels.
3. *How fast?* Whole training steps of a 1.2 B-parameter Llama in bf16, by torch alone, in FP8, as one CUDA graph and
   compiled (`benchmarks/gpu_training.py`); fused kernels beside torch, torch.compile and, where it is installed, Liger
   (`benchmarks/gpu_kernels.py`); decoding one token after the other (`benchmarks/gpu_decode.py`); layers at sizes well
   beyond the L2 cache. Nothing new begins after `--seconds`.

The table comes last, and beside it a JSON file. A part that fails leaves the others their rows, and ends with status 1.

MFU counts model FLOPs with the causal half of attention against the dense bf16 peak (`training/flops.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_decode, gpu_kernels, gpu_training
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.cuda_graphs import CudaRecorder
from minimegatron.layers.attention import AttentionContext, CoreAttention, SelfAttention
from minimegatron.layers.loss import vocab_parallel_cross_entropy
from minimegatron.layers.mask import AttentionMask
from minimegatron.layers.mlp import MLP
from minimegatron.layers.norm import Norm
from minimegatron.layers.param import initialize
from minimegatron.layers.rope import RotaryEmbedding
from minimegatron.models.spec import build_module, decoder_layer_spec
from minimegatron.models.zoo import family_config
from minimegatron.training.flops import peak_tflops

TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2}


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured line: what, how long, how much a second, and what share of the machine that is."""

    what: str
    milliseconds: float
    rate: float
    unit: str
    share: float | None = None
    against: dict[str, float] = dataclasses.field(default_factory=dict)


# ------------------------------------------------------------------------------------------------ the machine


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of a call, after a quarter as many that are not counted."""
    times = []
    for i in range(-(repeats // 4 + 1), repeats):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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


def machine(device: torch.device, smoke: bool) -> tuple[Row, Row]:
    """Copy bandwidth (bytes read and written) and bf16 matrix rate."""
    x = torch.empty(2**20 if smoke else 2**30, dtype=torch.bfloat16, device=device)
    y, n = torch.empty_like(x), 256 if smoke else 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    copy = milliseconds(lambda: y.copy_(x), device, 20)
    matmul = milliseconds(lambda: a @ b, device, 20)
    return (
        Row("copy", copy, 2 * x.nbytes / copy / 1e6, "GB/s"),
        Row(f"matrix product {n}", matmul, 2 * n**3 / matmul / 1e9, "TFLOP/s"),
    )


# ------------------------------------------------------------------------------------------------ right?


class CrossEntropy(torch.nn.Module):
    """The loss as a module, its input the logits."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        target = torch.arange(logits.shape[0] * logits.shape[1], device=logits.device).view(logits.shape[:2])
        return vocab_parallel_cross_entropy(logits, target % logits.shape[-1], Mesh.serial().tp)


class WithContext(torch.nn.Module):
    """A module that wants rotary angles and a mask beside its input."""

    def __init__(self, config: TransformerConfig, module: torch.nn.Module, mask: AttentionMask | None = None) -> None:
        super().__init__()
        self.rotary, self.inner, self.mask = RotaryEmbedding(config), module, mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[0], device=x.device).expand(x.shape[1], -1)
        return self.inner(x, AttentionContext(self.rotary(positions), self.mask))


def layers(config: TransformerConfig) -> Iterator[tuple[str, Callable[[], torch.nn.Module]]]:
    """(name, constructor) of everything that is compared; each maps [s, b, h] to something."""
    mesh, spec = Mesh.serial(), decoder_layer_spec(config)
    layernorm = config.replace(normalization="LayerNorm")
    yield "RMSNorm", lambda: Norm(config)
    yield "LayerNorm", lambda: Norm(layernorm)
    yield "MLP, SwiGLU", lambda: MLP(config, mesh)
    yield "cross entropy", CrossEntropy
    yield "attention", lambda: WithContext(config, SelfAttention(config, mesh))
    window = AttentionMask(window=16)
    yield "attention, window 16", lambda: WithContext(config, SelfAttention(config, mesh), window)
    yield "layer", lambda: WithContext(config, build_module(spec, config, mesh, 0, None))


def check(name: str, make: Callable[[], torch.nn.Module], config: TransformerConfig, device: torch.device) -> float:
    """Largest error of output and gradients, relative to the largest element of each, against fp64 on the CPU."""
    module, twin = make().to(device), make().double()
    initialize(module, seed=0)
    twin.load_state_dict(module.state_dict())
    x = torch.randn(64, 2, config.hidden_size, generator=torch.Generator().manual_seed(1)).to(config.dtype)
    results = []
    for model, inputs in ((module, x.to(device)), (twin, x.double())):
        inputs.requires_grad_()
        y = model(inputs)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(config.dtype)
        (y * weights.to(y)).sum().backward()
        tensors = [y.detach(), inputs.grad, *(p.grad for p in model.parameters())]
        results.append([t.double().cpu() for t in tensors if t is not None])
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*results, strict=True))


def check_all(device: torch.device) -> list[tuple[str, str, float]]:
    """(layer, dtype, error) of every layer in both dtypes."""
    found = []
    for dtype in TOLERANCE:
        config = family_config("llama", **{**gpu_training.TINY, "hidden_size": 256, "params_dtype": dtype})
        found += [(name, dtype, check(name, make, config, device)) for name, make in layers(config)]
    return found


def check_kernels(device: torch.device) -> bool:
    """Whether every fused kernel is right; prints each error."""
    right = True
    for case in gpu_kernels.cases():
        for name, dtype, error, tolerance in gpu_kernels.check(case, device):
            good = error <= tolerance
            print(f"{'kernel: ' + name:<34}{dtype:<10}error {error:.1e}{'' if good else '  WRONG'}", flush=True)
            right &= good
    return right


# ------------------------------------------------------------------------------------------------ how fast?


def time_kernels(device: torch.device, smoke: bool, copy: Row, matmul: Row) -> Iterator[Row]:
    """Fused kernels; `against` is how many times longer the others take."""
    timings: Iterator[gpu_kernels.Timing] = itertools.chain(
        *(gpu_kernels.time_case(case, device, smoke, milliseconds) for case in gpu_kernels.cases()),
        gpu_kernels.time_optimizer(device, smoke, milliseconds),
        gpu_kernels.time_fp8(device, smoke, milliseconds),
        gpu_kernels.time_fp8_linear(device, smoke, milliseconds),
    )
    for t in timings:
        of, ours = matmul if t.unit == "TFLOP/s" else copy, t.milliseconds["ours"]
        others = {name: took / ours for name, took in t.milliseconds.items() if name != "ours"}
        yield Row(t.what, ours, t.rate, t.unit, t.rate / of.rate, others)


SCALE = {"GB/s": 1e6, "TFLOP/s": 1e9}  # of bytes or FLOPs a millisecond


def both_ways(
    what: str, module: torch.nn.Module, inputs: tuple[Any, ...], work: tuple[float, float], of: Row, repeats: int
) -> Iterator[Row]:
    """Forward and backward of a module; `work` in what the machine's row `of` counts a second, bytes or FLOPs."""
    y = module(*inputs)
    dy, device = torch.randn_like(y), y.device
    wanted = [t for t in (*inputs, *module.parameters()) if isinstance(t, torch.Tensor)]
    runs: dict[str, Callable[[], object]] = {
        "forward": lambda: module(*inputs),
        "backward": lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True),
    }
    for (direction, run), amount in zip(runs.items(), work, strict=True):
        took = milliseconds(run, device, repeats)
        rate = amount / took / SCALE[of.unit]
        yield Row(f"{what}, {direction}", took, rate, of.unit, rate / of.rate)


def time_layers(device: torch.device, smoke: bool, copy: Row, matmul: Row) -> Iterator[Row]:
    """Layers in bf16, as shares of the copy bandwidth or of the matrix rate."""
    s, b, h, v, d, repeats = (64, 2, 64, 256, 32, 2) if smoke else (4096, 4, 4096, 128256, 128, 20)
    sizes = {"num_layers": 1, "hidden_size": h, "num_attention_heads": h // d, "vocab_size": v}
    config, mesh = family_config("llama", **sizes, params_dtype="bf16"), Mesh.serial()
    x = torch.randn(s, b, h, device=device, dtype=torch.bfloat16, requires_grad=True)
    logits = torch.randn(s * b // 2, 1, v, device=device, dtype=torch.bfloat16, requires_grad=True)
    heads = [torch.randn(s, b, h // d, d, device=device).bfloat16().requires_grad_() for _ in range(3)]
    norm, mlp = Norm(config).to(device), MLP(config, mesh).to(device)
    initialize(norm, 0)
    initialize(mlp, 0)

    yield from both_ways("RMSNorm", norm, (x,), (2.0 * x.nbytes, 3.0 * x.nbytes), copy, repeats)
    yield from both_ways(
        "cross entropy", CrossEntropy(), (logits,), (logits.nbytes, 2.0 * logits.nbytes), copy, repeats
    )
    flops = 2.0 * s * b * h * config.ffn_hidden_size * 3
    yield from both_ways("MLP, SwiGLU", mlp, (x,), (flops, 2 * flops), matmul, repeats)
    flops = 2.0 * 2 * b * h * s * s / 2
    core = CoreAttention(config, mesh)
    bare = milliseconds(lambda: bare_attention(*heads), device, repeats)
    for row in both_ways("core attention, causal", core, (*heads, None), (flops, 2.5 * flops), matmul, repeats):
        against = {"bare SDPA": bare / row.milliseconds} if row.what.endswith("forward") else {}
        yield dataclasses.replace(row, against=against)


def bare_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's own call on [s, b, a, d]."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def time_training(device: torch.device, smoke: bool, copy: Row, seconds_left: Callable[[], float]) -> Iterator[Row]:
    """Optimizer step and whole training steps; the share of a step in bf16 is MFU, FP8 has none."""
    peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    for what, took, rate, over in gpu_training.measure(device, smoke, milliseconds, seconds_left):
        if not what.startswith("training step"):
            yield Row(what, took, rate / 1e9, "GB/s", rate / 1e9 / copy.rate)
            continue
        share = rate / 1e12 / peak if peak and "FP8" not in what else None
        yield Row(what, took, rate / 1e12, "TFLOP/s", share, {} if over is None else {"bf16": over})


def time_decoding(device: torch.device, smoke: bool, copy: Row) -> Iterator[Row]:
    """One token after the other; the share is that of the copy bandwidth."""
    recorders = (lambda: CudaRecorder(device)) if device.type == "cuda" else None
    for what, took, rate, over in gpu_decode.measure(device, smoke, milliseconds, recorders):
        yield Row(what, took, rate / 1e9, "GB/s", rate / 1e9 / copy.rate, {} if over is None else {"no graph": over})


def profile_step(device: torch.device, smoke: bool) -> None:
    """Print where a training step spends its time."""
    sizes = gpu_training.TINY if smoke else gpu_training.LLAMA_1B
    training = gpu_training.Training(family_config("llama", **sizes, params_dtype="bf16"), device)
    step = training.step(2, 64 if smoke else 4096, 2)
    step()
    with torch.profiler.profile() as profiler:
        step()
    order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=70))


# ------------------------------------------------------------------------------------------------ the call


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--profile", action="store_true", help="also print where a training step spends its time")
    parser.add_argument(
        "--json", metavar="FILE", default="gpu.json", help="where the rows go as well; default gpu.json"
    )
    parser.add_argument("--seconds", type=float, default=540, help="begin nothing new when so many are over")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        parser.error("no GPU here; --smoke runs tiny sizes on the CPU")
    device = torch.device("cpu" if args.smoke else "cuda")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}", flush=True)

    copy, matmul = machine(device, args.smoke)
    errors = check_all(device)
    for layer, dtype, error in errors:
        print(f"{layer:<24}{dtype}  error {error:.1e}{'' if error <= TOLERANCE[dtype] else '  WRONG'}", flush=True)
    if any(error > TOLERANCE[dtype] for _, dtype, error in errors):
        return 1

    if not check_kernels(device):
        return 1

    begun = time.monotonic()

    def seconds_left() -> float:
        return args.seconds - (time.monotonic() - begun)

    rows, failed = [copy, matmul], []
    sections: dict[str, Callable[[], Iterator[Row]]] = {
        "training": lambda: time_training(device, args.smoke, copy, seconds_left),
        "kernels": lambda: time_kernels(device, args.smoke, copy, matmul),
        "decoding": lambda: time_decoding(device, args.smoke, copy),
        "layers": lambda: time_layers(device, args.smoke, copy, matmul),
    }
    for section, run in sections.items():
        try:  # what has been measured is worth printing, also where something later fails
            for row in run():
                rows.append(row)
                if seconds_left() < 0:
                    print(f"{section}: the time is up", flush=True)
                    break
        except Exception as error:
            failed.append(section)
            print(f"{section}: FAILED, {type(error).__name__}: {error}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if args.profile:
        profile_step(device, args.smoke)
    print(f"\n{'':<34}{'ms':>10}{'rate':>12}  {'unit':<10}{'share':>8}  times faster than")
    for row in rows:
        share = "" if row.share is None else f"{100 * row.share:5.1f} %"
        others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row.against.items())
        print(f"{row.what:<34}{row.milliseconds:>10.3f}{row.rate:>12.1f}  {row.unit:<10}{share:>8}  {others}".rstrip())
    Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    with open(args.json, "w", encoding="utf-8") as file:
        found = {"device": name, "torch": torch.__version__, "failed": failed}
        json.dump({**found, "rows": [dataclasses.asdict(row) for row in rows]}, file)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
