"""The fused kernels of `minimegatron/kernels`: each against fp64, then timed beside torch and torch.compile.

A case says its inputs, the operator, the same in torch, and how many bytes must move at least, forward and backward.
Checking comes first, on fresh random inputs of odd and even sizes, with outputs that are NaN before they are written.
Timing rotates through copies of the inputs that together exceed the L2 cache four times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from minimegatron.kernels import ops, reference
from minimegatron.kernels.optimizer import AdamTable, NormTable
from minimegatron.layers.fp8 import Fp8Recipe
from minimegatron.layers.fp8_linear import ParallelFp8
from minimegatron.layers.linear import ALONE

Tensors = tuple[torch.Tensor, ...]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator.

    Attributes:
        name: in the table.
        inputs: (size, dtype, device) -> float tensors, all differentiable.
        fused, plain, exact: operator, the same in torch, and the reference that is computed in fp64.
        sizes: large for timing, then small ones for checking; the first of these also for a smoke run.
        traffic: the least bytes, forward and backward, from the inputs; FLOPs where `unit` is TFLOP/s.
    """

    name: str
    inputs: Callable[[Sequence[int], torch.dtype, torch.device], Tensors]
    fused: Callable[..., torch.Tensor | Tensors]
    plain: Callable[..., torch.Tensor | Tensors]
    exact: Callable[..., torch.Tensor | Tensors]
    sizes: tuple[tuple[int, ...], ...]
    traffic: Callable[[Tensors], tuple[float, float]]
    unit: str = "GB/s"


def normal(*shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensors:
    """Normal numbers on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)


def _angles(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> Tensors:
    return _angles_of(x.shape[0], x.shape[-1] // 2, x.device, dtype)


# Beside the inputs, not part of what is timed.
@functools.cache
def _angles_of(s: int, r: int, device: torch.device, dtype: torch.dtype) -> Tensors:
    angle = torch.arange(s).float()[:, None] * 10000.0 ** (-torch.arange(r) / r)
    return tuple(t[:, None, None].to(device, dtype) for t in (angle.cos(), angle.sin()))


def _target(z: torch.Tensor) -> torch.Tensor:
    return _target_of(*z.shape, z.device)


@functools.cache
def _target_of(n: int, v: int, device: torch.device) -> torch.Tensor:
    return torch.arange(n, device=device) * 7919 % v


def _rope_torch(x: torch.Tensor) -> torch.Tensor:
    cos, sin = _angles(x, x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _add_norm_torch(x: torch.Tensor, r: torch.Tensor, g: torch.Tensor) -> Tensors:
    h = x + r
    return F.rms_norm(h, g.shape, g, EPS), h


def _causal_torch(x: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(x.shape[-1] - x.shape[-2] + 1)
    return (x.float() * 0.1).masked_fill(hidden, -torch.inf).softmax(-1).to(x.dtype)


def _maps(x: torch.Tensor, k: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """A shuffle of the k choices of every row, the same for one size."""
    return _maps_of(x.shape[0], k, x.device)


@functools.cache
def _maps_of(t: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    slots = torch.randperm(t * k, generator=torch.Generator().manual_seed(0)).to(device)
    return slots, ops.inverse(slots, t, k)


def _moe(x: torch.Tensor) -> torch.Tensor:
    slots, places = _maps(x)
    return ops.unpermute(ops.permute(x, slots, places), slots, places)


def _moe_torch(x: torch.Tensor) -> torch.Tensor:
    slots, places = _maps(x)
    y = x.index_select(0, slots // places.shape[1])
    return torch.zeros_like(x).index_add(0, slots // places.shape[1], y)


def _moe_exact(x: torch.Tensor) -> torch.Tensor:
    slots, places = _maps(x)
    return reference.unpermute(reference.permute(x, slots, places), slots, places)


def _loss_exact(z: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z, _target(z), reduction="none")


def cases() -> list[Case]:
    """Every differentiable operator. Sizes of the goals: Llama 8B's and larger."""

    def rows(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
        return normal(tuple(size), tuple(size[-1:]), dtype=dtype, device=device)

    def rows_and_bias(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
        return normal(tuple(size), tuple(size[-1:]), tuple(size[-1:]), dtype=dtype, device=device)

    def two_rows(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
        return normal(tuple(size), tuple(size), tuple(size[-1:]), dtype=dtype, device=device)

    def one(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
        return normal(tuple(size), dtype=dtype, device=device)

    def heads(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
        return normal(*[tuple(size)] * 3, dtype=dtype, device=device)

    def times(forward: float, backward: float) -> Callable[[Tensors], tuple[float, float]]:
        return lambda tensors: (forward * tensors[0].nbytes, backward * tensors[0].nbytes)

    def attention_flops(tensors: Tensors) -> tuple[float, float]:
        b, a, s, d = tensors[0].shape
        return 2.0 * b * a * s * s * d, 5.0 * b * a * s * s * d  # the causal half

    wide, small = (16384, 4096), ((8, 64), (3, 33), (2, 1000))
    inner, inner_small = (16384, 14336), ((4, 64), (3, 34), (2, 1000))
    return [
        Case("RMSNorm", rows, lambda x, g: ops.norm(x, g, None, EPS), lambda x, g: F.rms_norm(x, g.shape, g, EPS),
             lambda x, g: reference.norm(x, g, None, EPS), (wide, *small), times(2, 3)),
        Case("LayerNorm", rows_and_bias, lambda x, g, b: ops.norm(x, g, b, EPS),
             lambda x, g, b: F.layer_norm(x, g.shape, g, b, EPS), lambda x, g, b: reference.norm(x, g, b, EPS),
             (wide, *small), times(2, 3)),
        Case("add, RMSNorm", two_rows, lambda x, r, g: ops.add_norm(x, r, g, None, EPS), _add_norm_torch,
             lambda x, r, g: reference.add_norm(x, r, g, None, EPS), (wide, *small), times(4, 4)),
        Case("softmax, causal", one, lambda x: ops.scaled_softmax(x, 0.1, None, True), _causal_torch,
             lambda x: reference.scaled_softmax(x, 0.1, None, True),
             ((4, 16, 2048, 2048), (1, 2, 9, 16), (2, 1, 5, 33)), times(1.5, 2)),
        Case("SwiGLU", lambda size, *rest: one((*size[:-1], 2 * size[-1]), *rest), ops.swiglu,
             lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], reference.swiglu, (inner, *inner_small),
             times(1.5, 2.5)),
        Case("bias-GeLU", rows, lambda x, b: ops.bias_gelu(x, b, True),
             lambda x, b: F.gelu(x + b, approximate="tanh"), lambda x, b: reference.bias_gelu(x, b, True),
             (inner, *inner_small), times(2, 3)),
        Case("RoPE", one, lambda x: ops.rope(x, *_angles(x)), _rope_torch,
             lambda x: reference.rope(x, *(t.double() for t in _angles(x))),
             ((16384, 1, 40, 128), (5, 2, 3, 16), (3, 1, 1, 34)), times(2, 2)),
        Case("cross entropy", one, lambda z: ops.cross_entropy(z, _target(z)),
             lambda z: F.cross_entropy(z.float(), _target(z), reduction="none"), _loss_exact,
             ((8192, 128256), (6, 64), (3, 1001)), times(1, 2)),
        Case("MoE permute and back", one, _moe, _moe_torch, _moe_exact, ((16384, 2048), (7, 16), (3, 33)),
             times(18, 18)),
        Case("attention, ours to read", heads,
             lambda q, k, v: ops.flash_attention(q, k, v, q.shape[-1] ** -0.5)[0],
             lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
             lambda q, k, v: reference.attention(q, k, v, q.shape[-1] ** -0.5)[0],
             ((2, 16, 4096, 128), (1, 2, 40, 16), (1, 1, 33, 64)), attention_flops, "TFLOP/s"),
    ]  # fmt: skip


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


@dataclasses.dataclass(frozen=True)
class Timing:
    """One direction of a case: milliseconds of each contender, and what ours moves or computes a second."""

    what: str
    milliseconds: dict[str, float]
    rate: float
    unit: str


def rotated(make: Callable[[], Tensors], device: torch.device, smoke: bool) -> list[Tensors]:
    """Copies of the inputs that exceed the L2 cache four times together, at least two."""
    first = make()
    cache = 0 if smoke else 4 * torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(2, -(-cache // sum(t.nbytes for t in first)))
    return [first, *(tuple(t.clone() for t in first) for _ in range(copies - 1))]


def liger(name: str) -> dict[str, Callable[..., torch.Tensor | Tensors]]:
    """The same by the Liger kernels, where the package is installed and has it."""
    try:
        from liger_kernel.transformers import functional as theirs
    except ImportError:
        return {}
    found: dict[str, Callable[..., torch.Tensor]] = {
        "RMSNorm": lambda x, g: theirs.liger_rms_norm(x, g, EPS, in_place=False),
        "LayerNorm": lambda x, g, b: theirs.liger_layer_norm(x, g, b, EPS),
        "SwiGLU": lambda x: theirs.liger_swiglu(*(t.contiguous() for t in x.chunk(2, -1))),
        "cross entropy": lambda z: theirs.liger_cross_entropy(z, _target(z), reduction="none"),
    }
    return {"Liger": found[name]} if name in found else {}


def _runs(run: Callable[..., torch.Tensor | Tensors], inputs: Tensors) -> bool:
    """Whether somebody else's kernel runs here at all; says why not."""
    try:
        run(*inputs)
        return True
    except Exception as error:
        print(f"Liger: {type(error).__name__}: {error}", flush=True)
        return False


def time_case(case: Case, device: torch.device, smoke: bool, milliseconds: Callable[..., float]) -> Iterator[Timing]:
    """Forward, then backward, of ours, torch, torch.compile and Liger (the last two not in a smoke run)."""
    size, repeats = (case.sizes[1], 2) if smoke else (case.sizes[0], 20)
    inputs = rotated(lambda: case.inputs(size, torch.bfloat16, device), device, smoke)
    for tensors in inputs:
        for t in tensors:
            t.requires_grad_()
    contenders = {"ours": case.fused, "torch": case.plain}
    if not smoke:
        contenders["compiled"] = torch.compile(case.plain, dynamic=False)
        contenders |= liger(case.name)
    took: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for name, run in contenders.items():
        if name == "Liger" and not _runs(run, inputs[0]):
            continue
        turn = itertools.cycle(inputs)
        took["forward"][name] = milliseconds(lambda run=run, turn=turn: run(*next(turn)), device, repeats)
        graphs = [(_outputs(run(*tensors)), tensors) for tensors in inputs]
        dys = [[torch.randn_like(y) for y in outs] for outs, _ in graphs]
        each = itertools.cycle(zip(graphs, dys, strict=True))

        def backward(each: Iterator = each) -> object:
            (outs, tensors), dy = next(each)
            return torch.autograd.grad(outs, tensors, dy, retain_graph=True)

        took["backward"][name] = milliseconds(backward, device, repeats)
        del graphs, dys, each
    scale = {"GB/s": 1e6, "TFLOP/s": 1e9}[case.unit]
    for direction, work in zip(took, case.traffic(inputs[0]), strict=True):
        times = took[direction]
        yield Timing(f"{case.name}, {direction}", times, work / times["ours"] / scale, case.unit)


def time_optimizer(device: torch.device, smoke: bool, milliseconds: Callable[..., float]) -> Iterator[Timing]:
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
        "ours": milliseconds(lambda: table.step(**numbers), device, repeats),
        "torch": milliseconds(plain, device, repeats),
    }
    yield Timing("AdamW, main and bf16", took, 30 * total / took["ours"] / 1e6, "GB/s")
    norm, out = NormTable(grads), torch.zeros(2, dtype=torch.float64, device=device)
    took = {
        "ours": milliseconds(lambda: norm.add_to(out), device, repeats),
        "torch": milliseconds(lambda: torch._foreach_norm(grads, 2.0, dtype=torch.float64), device, repeats),
    }
    yield Timing("squared norm", took, 4 * total / took["ours"] / 1e6, "GB/s")


def time_fp8(device: torch.device, smoke: bool, milliseconds: Callable[..., float]) -> Iterator[Timing]:
    """Cast to E4M3, its transposed copy and amax."""
    (x,) = normal((64, 96) if smoke else (16384, 8192), dtype=torch.bfloat16, device=device)
    scale = torch.ones((), device=device)

    def plain() -> object:
        q = reference.fp8_cast(x, scale, torch.float8_e4m3fn)
        return q, q.t().contiguous(), x.abs().amax()

    contenders = {"ours": lambda: ops.cast(x, scale, torch.float8_e4m3fn, True), "torch": plain}
    if not smoke:
        contenders["compiled"] = torch.compile(plain, dynamic=False)
    took = {name: milliseconds(run, device, 2 if smoke else 20) for name, run in contenders.items()}
    yield Timing("FP8 cast, transpose, amax", took, 2 * x.nbytes / took["ours"] / 1e6, "GB/s")


def time_fp8_linear(device: torch.device, smoke: bool, milliseconds: Callable[..., float]) -> Iterator[Timing]:
    """All three products of a linear layer with their casts, beside bf16; recipes with one scale a tensor."""
    m, o, i = (32, 48, 64) if smoke else (16384, 4096, 4096)
    x, w, dy = normal((m, i), (o, i), (m, o), dtype=torch.bfloat16, device=device)
    x, w = x.requires_grad_(), w.requires_grad_()

    def both(y: torch.Tensor) -> object:
        return torch.autograd.grad(y, (x, w), dy)

    plain = milliseconds(lambda: both(F.linear(x, w)), device, 2 if smoke else 20)
    for kind in ("delayed", "current"):
        axes = dict.fromkeys(("input", "weight", "gradient"), ALONE)
        ours = functools.partial(ParallelFp8(Fp8Recipe(kind), axes).to(device).linear, bias=None, tp=ALONE)
        took = {"ours": milliseconds(lambda ours=ours: both(ours(x, w)), device, 2 if smoke else 20), "bf16": plain}
        yield Timing(f"FP8 linear, {kind}, both ways", took, 6.0 * m * o * i / took["ours"] / 1e9, "TFLOP/s")
