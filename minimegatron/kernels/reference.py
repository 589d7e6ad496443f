"""The specification of every kernel, in plain torch.

Each function takes any float dtype, computes in fp32 (fp64 for fp64 inputs) and rounds at the end, as its kernel does;
in fp64 it is the formula itself, differentiable by autograd. Every kernel is compared with it; `plain.py`, which
computes where there is no kernel, rounds between two operations. Shapes are those of the operators' docstrings.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ------------------------------------------------------------------------------------ norms, softmax, activations


def norm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float) -> torch.Tensor:
    """[..., n]: LayerNorm, or RMSNorm if beta is None."""
    h = _wide(x)
    if beta is not None:
        h = h - h.mean(-1, keepdim=True)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * _wide(gamma)
    return (y if beta is None else y + _wide(beta)).to(x.dtype)


def add_norm(
    x: torch.Tensor, r: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(h), h) with h = x + r rounded to the dtype."""
    h = (_wide(x) + _wide(r)).to(x.dtype)
    return norm(h, gamma, beta, eps), h


def scaled_softmax(
    x: torch.Tensor, scale: float, mask: torch.Tensor | None = None, causal: bool = False
) -> torch.Tensor:
    """softmax(scale x) over the last dim of [..., q, k].

    mask: bool, broadcastable, True where a query does *not* see a key. causal: query i sees keys j <= i + k - q.
    A query that sees nothing gets zeros, and so do its gradients.
    """
    z = _wide(x) * scale
    hidden = torch.zeros(x.shape[-2:], dtype=torch.bool, device=x.device)
    if causal:
        hidden = torch.ones_like(hidden).triu(x.shape[-1] - x.shape[-2] + 1)
    hidden = (hidden if mask is None else hidden | mask).expand(z.shape)
    blind = hidden.all(-1, keepdim=True)
    return z.masked_fill(hidden & ~blind, -torch.inf).softmax(-1).masked_fill(hidden | blind, 0.0).to(x.dtype)


def chunk_scan(
    scores: torch.Tensor, logs: torch.Tensor, x: torch.Tensor, documents: torch.Tensor | None = None
) -> torch.Tensor:
    """y_i = sum over j <= i of exp(logs_i - logs_j) scores_ij x_j, in each of m chunks of l tokens.

    scores: [m, groups, l, l]. logs: [m, heads, l]. x: [m, l, heads, p]. documents: [m, l]; tokens of different ones do
    not see each other.
    """
    place = torch.arange(x.shape[1], device=x.device)
    pairs = place[:, None] >= place
    if documents is not None:
        pairs = (pairs & (documents[:, :, None] == documents[:, None]))[:, None, None]
    a, x = logs.unflatten(1, (scores.shape[1], -1)), x.unflatten(2, (scores.shape[1], -1))  # heads by groups
    decays = (a[..., None] - a[..., None, :]).masked_fill(~pairs, -torch.inf).exp()
    return torch.einsum("mgrij,mjgrp->migrp", scores[:, :, None] * decays, x).flatten(2, 3)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """[..., 2 f] = [gate, up] -> [..., f]: silu(gate) * up."""
    gate, up = _wide(x).chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: bool = False) -> torch.Tensor:
    """gelu(x + bias) over [..., f], with erf, or with tanh if `approximate`."""
    return F.gelu(_wide(x) + _wide(bias), approximate="tanh" if approximate else "none").to(x.dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first 2 r channels of x [s, b, heads, d] by cos, sin [s, b or 1, 1, r]."""
    z, r = _wide(x), cos.shape[-1]
    a, b = (z[..., 0 : 2 * r : 2], z[..., 1 : 2 * r : 2]) if interleaved else (z[..., :r], z[..., r : 2 * r])
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned, z[..., 2 * r :]), -1).to(x.dtype)


# ---------------------------------------------------------------------------------------------------- cross entropy


def cross_entropy_statistics(
    logits: torch.Tensor, target: torch.Tensor, first: int, real: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each row of this rank's columns [n, w], words first .. first + real - 1: the numbers that ranks combine.

    Returns:
        (m, the largest; sum of exp(z - m); the target's z or 0 if another rank has it; sum of z), each [n].
    """
    z = _wide(logits)[:, :real]
    own = (target >= first) & (target < first + real)
    column = (target - first).masked_fill(~own, 0)
    if real == 0:
        zero = z.new_zeros(z.shape[0])
        return torch.full_like(zero, -torch.inf), zero, zero.clone(), zero.clone()
    m = z.amax(-1)
    picked = z.gather(-1, column[:, None]).squeeze(-1).masked_fill(~own, 0.0)
    return m, (z - m[:, None]).exp().sum(-1), picked, z.sum(-1)


def cross_entropy_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    dloss: torch.Tensor,
    first: int,
    real: int,
    hit: float = 1.0,
    spread: float = 0.0,
) -> torch.Tensor:
    """(exp(z - lse) - spread - hit [j is the target]) dloss in the first `real` columns, 0 in the padding: [n, w]."""
    z = _wide(logits)
    own = (target >= first) & (target < first + real)
    dz = (z - lse[:, None]).exp() - spread
    rows = own.nonzero().squeeze(-1)
    dz[rows, target[rows] - first] -= hit
    dz = dz * dloss[:, None]
    dz[:, real:] = 0.0
    return dz.to(logits.dtype)


# -------------------------------------------------------------------------------------------------- optimizer, experts


def adam_(
    main: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> None:
    """One AdamW step in place: decoupled decay, bias correction; the gradient is multiplied by `grad_scale` first."""
    g = grad.to(main.dtype) * grad_scale
    main.mul_(1 - lr * weight_decay)
    exp_avg.mul_(beta1).add_(g, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step) + eps
    main.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


def squared_norm(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of squares, how many elements are not finite), both fp64 scalars."""
    device = tensors[0].device if tensors else torch.device("cpu")
    total, bad = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    for x in tensors:
        total = total + x.double().square().sum()
        bad = bad + (~x.isfinite()).sum()
    return total, bad


def permute(x: torch.Tensor, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x [t, h] -> [n, h]: row i is token slots[i] // k of the choices [t, k]; slot -1 is a row of zeros."""
    return x[slots.clamp(min=0) // places.shape[1]] * (slots >= 0)[:, None]


def unpermute(
    y: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, probs: torch.Tensor | None = None
) -> torch.Tensor:
    """y [n, h] -> [t, h]: sum over j of probs[t, j] y[places[t, j]]; place -1 adds nothing (a dropped token)."""
    rows = _wide(y)[places.clamp(min=0)] * (places >= 0)[..., None]
    return (rows if probs is None else rows * _wide(probs)[..., None]).sum(1).to(y.dtype)


# -------------------------------------------------------------------------------------------------------------- fp8

FP8_TOP = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def fp8_cast(x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """x scale, clamped to the largest number of the format, rounded to nearest even. NaN stays NaN.

    The clamp is necessary: torch's own cast of larger numbers differs between its versions.
    """
    top = FP8_TOP[dtype]
    return (_wide(x) * scale).clamp(-top, top).to(torch.float32).to(dtype)


def scale_for(amax: torch.Tensor, dtype: torch.dtype, margin: int = 0) -> torch.Tensor:
    """The scale of a tensor: largest number of the format / 2^margin / amax, fp32 and finite; 1 if amax is 0 or not
    finite."""
    top = torch.full_like(amax, FP8_TOP[dtype] / 2**margin, dtype=torch.float32)
    scale = (top / amax.float()).clamp(max=torch.finfo(torch.float32).max)  # one rounding; a number / tensor has two
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))


def tile_amax(x: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """x [m, n] -> amax of each tile, fp32 [ceil(m / tile[0]), ceil(n / tile[1])]."""
    (m, n), (bm, bn) = x.shape, tile
    padded = torch.nn.functional.pad(x.float(), (0, -n % bn, 0, -m % bm)).abs()
    return padded.unflatten(1, (-1, bn)).unflatten(0, (-1, bm)).amax((1, 3))


def tile_scales(amax: torch.Tensor, dtype: torch.dtype, rule: str) -> torch.Tensor:
    """The divisors of tiles with these amax; 1 where it is 0 or not finite.

    rule: "float" amax / largest number; "power" the smallest power of two that keeps amax within the format; "mx"
    2^(floor(log2 amax) - emax), which saturates values beyond 1.75 2^emax (OCP Microscaling 1.0).
    """
    if rule == "float":
        scale = (amax / FP8_TOP[dtype]).clamp(min=torch.finfo(torch.float32).tiny)
    else:
        mantissa, exponent = torch.frexp(amax)  # in [1/2, 1), so that floor(log2 amax) = exponent - 1
        e = exponent - 1 - (15 if dtype == torch.float8_e5m2 else 8)
        e = e + (mantissa > 0.875) if rule == "power" else e
        scale = torch.ldexp(torch.ones_like(amax), e.clamp(-126, 127))
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def fp8_cast_tiles(
    x: torch.Tensor, tile: tuple[int, int], dtype: torch.dtype, rule: str = "float"
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, n] -> (q [m, n], scales): x is q times the scale of its tile."""
    scales = tile_scales(tile_amax(x, tile), dtype, rule)
    return fp8_cast(_wide(x) / spread_tiles(scales, tile, x.shape), 1.0, dtype), scales


def spread_tiles(scales: torch.Tensor, tile: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """The scale of every element, `shape`."""
    (m, n), (bm, bn) = scales.shape, tile
    spread = scales[:, None, :, None].expand(m, bm, n, bn).reshape(m * bm, n * bn)
    return spread[: shape[0], : shape[1]]


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude, fp32; 0 for an empty tensor, NaN if x has one."""
    return x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)


# -------------------------------------------------------------------------------------------------------- attention


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [b, a, n, d], k, v [b, g, m, d] -> out [b, a, n, d], lse [b, a, n]; causal: query i sees j <= i + m - n."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (_wide(t).repeat_interleave(repeat, 1) for t in (k, v))
    z = _wide(q) @ k.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).triu(z.shape[-1] - z.shape[-2] + 1)
        z = z.masked_fill(hidden, -torch.inf)
    lse = z.logsumexp(-1)
    p = (z - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return (p @ v).to(q.dtype), lse
