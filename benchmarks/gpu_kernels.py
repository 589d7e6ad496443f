"""The fused kernels of `minimegatron/kernels`: each against fp64, then timed beside torch and torch.compile.

Checking comes first, on fresh random inputs of odd and even sizes, with outputs that are NaN before they are written.
Timing rotates through copies of the inputs that together exceed the L2 cache four times. Which kernels, and what they
are held against: `benchmarks/gpu_cases.py`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu_cases import Case, Tensors, liger, normal
from benchmarks.gpu_cases import cases as cases
from benchmarks.gpu_parts import Found, Row
from minimegatron.comm.axis import ALONE
from minimegatron.kernels import fp8, reference
from minimegatron.kernels.optimizer import AdamTable, NormTable
from minimegatron.layers.fp8.linear import ParallelFp8
from minimegatron.layers.fp8.matmul import Fp8Recipe

Timer = Callable[[Callable[[], object], torch.device, int], float]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _outputs(y: torch.Tensor | Tensors) -> Tensors:
    return y if isinstance(y, tuple) else (y,)


# ---------------------------------------------------------------------------------------------------- right?


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Every tensor that is only allocated holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check(case: Case, device: torch.device) -> Iterator[tuple[str, str, float, float]]:
    """(name, dtype, largest relative error of output and gradients over the small sizes, tolerance)."""
    for dtype, tolerance in TOLERANCE.items():
        worst = 0.0
        for size in case.sizes[1:]:
            inputs = case.inputs(size, dtype, device)
            results = []
            for run, given in ((case.fused, inputs), (case.exact, tuple(t.cpu().double() for t in inputs))):
                given = tuple(t.clone().requires_grad_() for t in given)
                with poisoned():
                    outs = _outputs(run(*given))
                    dys = normal(*(tuple(y.shape) for y in outs), dtype=dtype, device=torch.device("cpu"), seed=1)
                    grads = torch.autograd.grad(outs, given, [d.to(y) for d, y in zip(dys, outs, strict=True)])
                results.append([t.detach().double().cpu() for t in (*outs, *grads)])
            for got, want in zip(*results, strict=True):
                found = ((got - want).abs().max() / want.abs().max()).item()
                worst = found if not found <= worst else worst  # a NaN is the worst
        yield case.name, str(dtype).removeprefix("torch."), worst, tolerance


# ---------------------------------------------------------------------------------------------------- how fast?


def rotated(make: Callable[[], Tensors], device: torch.device, smoke: bool) -> list[Tensors]:
    """Copies of the inputs that exceed the L2 cache four times together, at least two."""
    first = make()
    cache = 0 if smoke else 4 * torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(2, -(-cache // sum(t.nbytes for t in first)))
    return [first, *(tuple(t.clone() for t in first) for _ in range(copies - 1))]


def _runs(run: Callable[..., torch.Tensor | Tensors], inputs: Tensors) -> bool:
    """Whether somebody else's kernel runs here at all; says why not."""
    try:
        run(*inputs)
        return True
    except Exception as error:
        print(f"Liger: {type(error).__name__}: {error}", flush=True)
        return False


def time_case(
    case: Case, device: torch.device, smoke: bool, timer: Timer, found: Found, compiled: bool = False
) -> Iterator[Row]:
    """Forward, then backward, of ours beside torch and Liger, or beside torch.compile."""
    size, repeats = (case.sizes[1], 2) if smoke else (case.sizes[0], 20)
    inputs = rotated(lambda: case.inputs(size, torch.bfloat16, device), device, smoke)
    for tensors in inputs:
        for t in tensors:
            t.requires_grad_()
    contenders = {"ours": case.fused}
    if compiled:
        contenders["compiled"] = torch.compile(case.plain, dynamic=False)
    else:
        contenders |= {"torch": case.plain, **({} if smoke else liger(case.name))}
    took: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for name, run in contenders.items():
        if name == "Liger" and not _runs(run, inputs[0]):
            continue
        turn = itertools.cycle(inputs)
        took["forward"][name] = timer(lambda run=run, turn=turn: run(*next(turn)), device, repeats)
        graphs = [(_outputs(run(*tensors)), tensors) for tensors in inputs]
        dys = [[torch.randn_like(y) for y in outs] for outs, _ in graphs]
        each = itertools.cycle(zip(graphs, dys, strict=True))

        def backward(each: Iterator = each) -> object:
            (outs, tensors), dy = next(each)
            return torch.autograd.grad(outs, tensors, dy, retain_graph=True)

        took["backward"][name] = timer(backward, device, repeats)
        del graphs, dys, each
    beside = " beside torch.compile" if compiled else ""
    for direction, work in zip(took, case.traffic(inputs[0]), strict=True):
        yield _row(f"{case.name}, {direction}{beside}", took[direction], work, case.unit, found)


def _row(what: str, took: dict[str, float], work: float, unit: str, found: Found) -> Row:
    """From milliseconds of each contender; `work` in bytes or FLOPs."""
    ours = took["ours"]
    rate, of = (work / ours / 1e9, "matrix product") if unit == "TFLOP/s" else (work / ours / 1e6, "copy")
    others = {name: each / ours for name, each in took.items() if name != "ours"}
    return Row(what, ours, rate, unit, found.share(rate, of), others)


def time_optimizer(device: torch.device, smoke: bool, timer: Timer, found: Found) -> Iterator[Row]:
    """AdamW with fp32 main parameters and bf16 copies, beside torch's fused AdamW with a copy; and the norm."""
    n, count, repeats = (1000, 3, 2) if smoke else (1 << 24, 16, 20)
    shapes = [(n + 4 * i,) for i in range(count)]
    main, grads, m, v = (list(normal(*shapes, dtype=torch.float32, device=device, seed=i)) for i in range(4))
    v = [t.abs() for t in v]
    model = [p.bfloat16() for p in main]
    table, total = AdamTable(main, grads, m, v, model), sum(p.numel() for p in main)
    numbers = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 10}
    twins = [p.clone().requires_grad_() for p in main]
    for p, g in zip(twins, grads, strict=True):
        p.grad = g
    adam = torch.optim.AdamW(twins, 1e-4, (0.9, 0.95), 1e-8, 0.1, fused=True)

    def plain() -> None:
        adam.step()
        torch._foreach_copy_(model, twins)

    took = {
        "ours": timer(lambda: table.step(**numbers), device, repeats),
        "torch": timer(plain, device, repeats),
    }
    yield _row("AdamW, main and bf16", took, 30.0 * total, "GB/s", found)
    norm, out = NormTable(grads), torch.zeros(2, dtype=torch.float64, device=device)
    took = {
        "ours": timer(lambda: norm.add_to(out), device, repeats),
        "torch": timer(lambda: torch._foreach_norm(grads, 2.0, dtype=torch.float64), device, repeats),
    }
    yield _row("squared norm", took, 4.0 * total, "GB/s", found)


def time_fp8(device: torch.device, smoke: bool, timer: Timer, found: Found) -> Iterator[Row]:
    """Cast to E4M3, its transposed copy and amax."""
    (x,) = normal((64, 96) if smoke else (16384, 8192), dtype=torch.bfloat16, device=device)
    scale, seen = torch.ones((), device=device), torch.zeros((), device=device)

    def plain() -> object:
        q = reference.fp8_cast(x, scale, torch.float8_e4m3fn)
        return q, q.t().contiguous(), x.abs().amax()

    contenders = {"ours": lambda: fp8.cast(x, scale, torch.float8_e4m3fn, seen, True), "torch": plain}
    took = {name: timer(run, device, 2 if smoke else 20) for name, run in contenders.items()}
    yield _row("FP8 cast, transpose, amax", took, 2.0 * x.nbytes, "GB/s", found)


def time_fp8_linear(device: torch.device, smoke: bool, timer: Timer, found: Found) -> Iterator[Row]:
    """All three products of a linear layer with their casts, beside bf16; recipes with one scale a tensor."""
    m, o, i = (32, 48, 64) if smoke else (16384, 4096, 4096)
    x, w, dy = normal((m, i), (o, i), (m, o), dtype=torch.bfloat16, device=device)
    x, w = x.requires_grad_(), w.requires_grad_()

    def both(y: torch.Tensor) -> object:
        return torch.autograd.grad(y, (x, w), dy)

    plain = timer(lambda: both(F.linear(x, w)), device, 2 if smoke else 20)
    for kind in ("delayed", "current"):
        axes = dict.fromkeys(("input", "weight", "gradient"), ALONE)
        ours = ParallelFp8(Fp8Recipe(kind), axes).to(device).linear
        took = {"ours": timer(lambda ours=ours: both(ours(x, w)), device, 2 if smoke else 20), "bf16": plain}
        yield _row(f"FP8 linear, {kind}, both ways", took, 6.0 * m * o * i, "TFLOP/s", found)
