"""How far two tensors are from each other, in units of the largest element, and how far is normal.

In fp64 only mistakes are visible: roundings are near 1e-15, the limit is 1e-7. In the run's own precision a rounding at
the first layer moves every number behind it, and no one limit is right for a loss and for the gradient of a norm. So
the limit is measured, tensor by tensor: another run in that precision is as far from fp64 as rounding alone makes it,
and what is compared may be `MARGIN` times as far (right layouts are within 2 times):

    |compared - fp64|  <=  MARGIN * max( |other - fp64| here,  the median of it in this pass,  eps )

Megatron-LM has no such comparison; its users ask which tolerance is normal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import torch

from minimegatron.training.observers.checks import FLOOR
from minimegatron.training.probe import Place

EXACT = 1e-7  # of a tensor's largest element, in fp64
MARGIN = 4.0


def distance_of(got: torch.Tensor, want: torch.Tensor, floor: float) -> float:
    """max |got - want| / max |want|; inf where one is not finite and the other is."""
    if got.shape != want.shape:
        return math.inf
    if not got.numel():
        return 0.0
    got, want = got.double(), want.double()
    alike = (got == want) | (got.isnan() & want.isnan())
    off = (got - want).abs().masked_fill(alike, 0.0).nan_to_num(nan=math.inf, posinf=math.inf).max().item()
    return off / max(want.abs().nan_to_num(posinf=0.0).max().item(), floor) if off else 0.0


def where_of(got: torch.Tensor, want: torch.Tensor) -> str:
    """Where the largest difference is, and the factor if there is one."""
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, and the reference has {tuple(want.shape)}"
    off = (got.double() - want.double()).abs().nan_to_num(nan=math.inf)
    flat = int(off.flatten().argmax())
    index = []
    for length in reversed(off.shape):
        flat, i = divmod(flat, length)
        index.append(i)
    place = f"largest at {list(reversed(index))}" if index else ""
    factor = factor_of(got, want)
    return ", ".join(filter(None, [place, f"it is {factor:.6g} times the reference" if factor else ""]))


def factor_of(got: torch.Tensor, want: torch.Tensor) -> float | None:
    """c if got = c want to 5 digits, else None."""
    a, b = got.double().flatten(), want.double().flatten()
    square = (b * b).sum().item()
    if not square or not math.isfinite(square):
        return None
    c = ((a * b).sum() / square).item()
    return c if math.isfinite(c) and (a - c * b).norm().item() <= 1e-5 * abs(c) * square**0.5 and c else None


def largest_by_pass(tensors: Mapping[Place, torch.Tensor]) -> dict[str, float]:
    """The largest element of all tensors of a pass."""
    largest: dict[str, float] = {}
    for place, tensor in tensors.items():
        top = tensor.double().abs().nan_to_num(posinf=0.0).max().item() if tensor.numel() else 0.0
        largest[place.phase] = max(largest.get(place.phase, 1e-300), top)
    return largest


def measured_limits(
    exact: dict[Place, torch.Tensor],
    rounded: dict[Place, torch.Tensor],
    largest: dict[str, float],
    dtype: torch.dtype,
) -> dict[Place, float]:
    """`MARGIN` times the distance that rounding makes: here, as a rule in this pass, or of one number."""
    both = [place for place in exact if place in rounded]
    noise = {p: distance_of(rounded[p], exact[p], FLOOR * largest[p.phase]) for p in both}
    usual = {
        phase: statistics.median([d for p, d in noise.items() if p.phase == phase] or [0.0])
        for phase in ("forward", "gradient", "recompute")
    }
    eps = torch.finfo(dtype).eps
    return {p: MARGIN * max(noise[p], usual[p.phase], eps) for p in both}
