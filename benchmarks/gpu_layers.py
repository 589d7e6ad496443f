"""Layers on one GPU: right beside fp64 on the CPU, and how fast at sizes well beyond the L2 cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import gpu_training
from benchmarks.gpu_parts import Found, Row
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.attention.self_attention import AttentionContext, CoreAttention, SelfAttention
from minimegatron.layers.logical import initialize
from minimegatron.layers.loss import vocab_parallel_cross_entropy
from minimegatron.layers.mlp import MLP
from minimegatron.layers.norm import Norm
from minimegatron.layers.rope import RotaryEmbedding
from minimegatron.models.families import family_config
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import build_module

Timer = gpu_training.Timer
TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2}
COPY, PRODUCT = "copy", "matrix product"  # rows that others are shares of


class CrossEntropy(torch.nn.Module):
    """The loss as a module, its input the logits."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        target = torch.arange(logits.shape[0] * logits.shape[1], device=logits.device).view(logits.shape[:2])
        return vocab_parallel_cross_entropy(logits, target % logits.shape[-1], Mesh.serial().tp)


class WithContext(torch.nn.Module):
    """A module that wants rotary angles and a mask beside its input."""

    def __init__(self, config: TransformerConfig, module: torch.nn.Module, mask: AttentionMask | None = None) -> None:
        super().__init__()
        self.rotary, self.inner, self.mask = RotaryEmbedding(config), module, mask or AttentionMask()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[0], device=x.device).expand(x.shape[1], -1)
        return self.inner(x, AttentionContext(self.rotary(positions), self.mask))


def layers(config: TransformerConfig) -> Iterator[tuple[str, Callable[[Mesh], torch.nn.Module]]]:
    """(name, constructor) of everything that is compared; each maps [s, b, h] to something."""
    spec, layernorm = decoder_layer_spec(config), config.replace(normalization="LayerNorm")
    yield "RMSNorm", lambda mesh: Norm(config)
    yield "LayerNorm", lambda mesh: Norm(layernorm)
    yield "MLP, SwiGLU", lambda mesh: MLP(config, mesh)
    yield "cross entropy", lambda mesh: CrossEntropy()
    yield "attention", lambda mesh: WithContext(config, SelfAttention(config, mesh))
    window = functools.partial(AttentionMask, window=16)  # each its own: a mask keeps tables on its device
    yield "attention, window 16", lambda mesh: WithContext(config, SelfAttention(config, mesh), window())
    yield "layer", lambda mesh: WithContext(config, build_module(spec, config, mesh, 0, None))


def check(make: Callable[[Mesh], torch.nn.Module], config: TransformerConfig, device: torch.device) -> float:
    """Largest error of output and gradients, relative to the largest element of each, against fp64 on the CPU."""
    with torch.device("meta"):
        module = make(Mesh.serial(device=device))
    initialize(module, 0, device)
    twin = make(Mesh.serial()).double()
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


def check_all(device: torch.device) -> Iterator[str]:
    """The error of every layer in both dtypes, as it becomes known.

    Raises:
        RuntimeError: after all of them, with those that are wrong.
    """
    wrong = []
    for dtype, tolerance in TOLERANCE.items():
        config = family_config("llama", **{**gpu_training.TINY, "hidden_size": 256, "params_dtype": dtype})
        for name, make in layers(config):
            error = check(make, config, device)
            wrong += [] if error <= tolerance else [f"{name} in {dtype}"]
            yield f"{name:<24}{dtype}  error {error:.1e}{'' if error <= tolerance else '  WRONG'}"
    if wrong:
        raise RuntimeError(f"WRONG: {', '.join(wrong)}")


# ------------------------------------------------------------------------------------------------ how fast?


SCALE = {"GB/s": 1e6, "TFLOP/s": 1e9}  # of bytes or FLOPs a millisecond
UNIT = {COPY: "GB/s", PRODUCT: "TFLOP/s"}


def both_ways(
    what: str,
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    work: tuple[float, float],
    of: str,
    repeats: int,
    found: Found,
    timer: Timer,
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
        took = timer(run, device, repeats)
        rate = amount / took / SCALE[UNIT[of]]
        yield Row(f"{what}, {direction}", took, rate, UNIT[of], found.share(rate, of))


def time_layers(device: torch.device, smoke: bool, timer: Timer, found: Found) -> Iterator[Row]:
    """Layers in bf16, as shares of the copy bandwidth or of the matrix rate."""
    s, b, h, v, d, repeats = (64, 2, 64, 256, 32, 2) if smoke else (4096, 4, 4096, 128256, 128, 20)
    sizes = {"num_layers": 1, "hidden_size": h, "num_attention_heads": h // d, "vocab_size": v}
    config, mesh = family_config("llama", **sizes, params_dtype="bf16"), Mesh.serial(device=device)
    rest: Any = (repeats, found, timer)
    heads = tuple(torch.randn(s, b, h // d, d, device=device).bfloat16().requires_grad_() for _ in range(3))
    flops = 2.0 * 2 * b * h * s * s / 2
    core = CoreAttention(config, mesh)
    bare = timer(lambda: bare_attention(*heads), device, repeats)
    for row in both_ways("core attention, causal", core, (*heads, None), (flops, 2.5 * flops), PRODUCT, *rest):
        against = {"bare SDPA": bare / row.milliseconds} if row.what.endswith("forward") else {}
        yield dataclasses.replace(row, against=against)

    x = torch.randn(s, b, h, device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.device("meta"):
        norm, mlp = Norm(config), MLP(config, mesh)
    initialize(norm, 0, device)
    initialize(mlp, 0, device)
    yield from both_ways("RMSNorm layer", norm, (x,), (2.0 * x.nbytes, 3.0 * x.nbytes), COPY, *rest)
    flops = 2.0 * s * b * h * config.ffn_hidden_size * 3
    yield from both_ways("MLP layer, SwiGLU", mlp, (x,), (flops, 2 * flops), PRODUCT, *rest)

    logits = torch.randn(s * b // 2, 1, v, device=device, dtype=torch.bfloat16, requires_grad=True)
    nbytes = float(logits.nbytes)
    yield from both_ways("cross entropy layer", CrossEntropy(), (logits,), (nbytes, 2 * nbytes), COPY, *rest)


def bare_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's own call on [s, b, a, d]."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
