"""One GPU, one call, under ten minutes: is it right, how fast is it, what share of this machine is that?

    python -m benchmarks.gpu                 everything; needs torch and one GPU, no network
    python -m benchmarks.gpu --smoke         tiny sizes on the CPU: does the script itself work?

In this order, so that nothing wrong is ever timed:

1. *The machine.* Copy bandwidth and the bf16 matrix rate, measured here and now: every share below is of these.
2. *Right?* Each layer and each fused kernel, forward and backward, in fp32 and bf16 on the device against fp64 on the
   CPU with the same weights and inputs. A failed check ends the run with status 1. A smoke run emulates the kernels.
3. *How fast?* Fused kernels beside torch and torch.compile (`benchmarks/gpu_kernels.py`), layers at sizes well beyond
   the L2 cache, then whole training steps of a 1.2 B-parameter Llama: sequence 4096, bf16 with fp32 main parameters,
   gradients and moments, no recompute, no compilation.

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
from typing import Any

import torch

from benchmarks import gpu_kernels
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, TransformerConfig
from minimegatron.layers.attention import AttentionContext, CoreAttention, SelfAttention
from minimegatron.layers.loss import vocab_parallel_cross_entropy
from minimegatron.layers.mask import AttentionMask
from minimegatron.layers.mlp import MLP
from minimegatron.layers.norm import Norm
from minimegatron.layers.param import initialize
from minimegatron.layers.rope import RotaryEmbedding
from minimegatron.models.decoder import build_model
from minimegatron.models.spec import build_module, decoder_layer_spec
from minimegatron.models.zoo import count_parameters, family_config
from minimegatron.optim.optimizer import build_optimizer
from minimegatron.optim.schedule import OptimizerParamScheduler, Schedule
from minimegatron.parallel.ddp import DistributedDataParallel
from minimegatron.training.flops import peak_tflops, step_flops
from minimegatron.training.step import forward_step, train_step

TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2}
LLAMA_1B = {
    "num_layers": 22, "hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 16, "ffn_hidden_size": 5632,
    "vocab_size": 32000, "untie_embeddings_and_output_weights": False,
}  # fmt: skip
TINY = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 128,
    "vocab_size": 256, "untie_embeddings_and_output_weights": False,
}  # fmt: skip


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
        config = family_config("llama", **{**TINY, "hidden_size": 256, "params_dtype": dtype})
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
    yield from both_ways("core attention, causal", core, (*heads, None), (flops, 2.5 * flops), matmul, repeats)


def time_training(device: torch.device, smoke: bool, copy: Row, profile: bool) -> Iterator[Row]:
    """Optimizer step and whole training steps, at the largest micro-batch of the list that fits."""
    s, sizes, accumulation, repeats = (64, [2], 2, 2) if smoke else (4096, [8, 4, 2, 1], 4, 8)
    config = family_config("llama", **(TINY if smoke else LLAMA_1B), params_dtype="bf16")
    mesh = Mesh.serial(device=device)
    model = DistributedDataParallel(build_model(config, mesh, seed=0), mesh)
    settings = OptimizerConfig(lr=1e-4, lr_decay_style="constant")
    optimizer = build_optimizer(settings, model, mesh)
    schedule = Schedule.from_config(settings, global_batch_size=1, train_iters=10**6)
    scheduler = OptimizerParamScheduler(optimizer.param_groups, schedule)
    n = count_parameters(config)
    print(f"Llama of {n / 1e9:.2f} B parameters, sequence {s}, {accumulation} microbatches a step", flush=True)

    took = milliseconds(optimizer.step, device, repeats)
    moved = 34.0 * n  # norm 4; gradient 4, main 8, moments 16 read and written, bf16 weight 2
    yield Row("norm, clip and AdamW", took, moved / took / 1e6, "GB/s", moved / took / 1e6 / copy.rate)

    for micro in sizes:
        ids = torch.randint(0, config.vocab_size, (micro, s + 1), device=device)
        batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": torch.ones(micro, s, device=device)}
        data = itertools.repeat(batch)

        def step(data: Any = data) -> None:
            train_step(forward_step, data, model, optimizer, scheduler, mesh, num_microbatches=accumulation)

        try:
            took = milliseconds(step, device, repeats)
            break
        except torch.OutOfMemoryError:
            print(f"micro-batch {micro} does not fit", flush=True)
            torch.cuda.empty_cache()
    else:
        raise SystemExit("no micro-batch fits")
    flops = step_flops(config, micro * accumulation, s)
    peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    rate = flops / took / 1e9
    tokens = 1e3 * micro * accumulation * s / took
    print(f"micro-batch {micro}: {tokens:.0f} tokens/s, {n * 18 / 1e9:.1f} GB of weights, gradients and moments")
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB")
    yield Row("training step (share: MFU)", took, rate, "TFLOP/s", rate / peak if peak else None)
    if profile:
        with torch.profiler.profile() as profiler:
            step()
        order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=70))


# ------------------------------------------------------------------------------------------------ the call


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--profile", action="store_true", help="also print where a training step spends its time")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
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

    rows = [copy, matmul, *time_kernels(device, args.smoke, copy, matmul)]
    rows += [*time_layers(device, args.smoke, copy, matmul)]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    rows += time_training(device, args.smoke, copy, args.profile)
    print(f"\n{'':<34}{'ms':>10}{'rate':>12}  {'unit':<10}{'share':>8}  times faster than")
    for row in rows:
        share = "" if row.share is None else f"{100 * row.share:5.1f} %"
        others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row.against.items())
        print(f"{row.what:<34}{row.milliseconds:>10.3f}{row.rate:>12.1f}  {row.unit:<10}{share:>8}  {others}".rstrip())
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"device": name, "torch": torch.__version__, "rows": [dataclasses.asdict(r) for r in rows]}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
