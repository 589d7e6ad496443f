"""Rows of tokens to rows of experts and back. Kernels: `csrc/permute.cu`.

    slots [n]       row i of the permuted tensor is slot t k + j, the j-th choice of token t; -1: a row of padding
    places [t, k]   the inverse: where choice j of token t went; -1: dropped

Each must be the other's inverse: the backward pass of one gathers with the other. `inverse` makes one from the other.
"""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.errors import require
from minimegatron.kernels import checks
from minimegatron.kernels.launch import DTYPES, accumulator, run


def permute(x: torch.Tensor, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x [t, h] -> [n, h]: row i is token slots[i] // k, or zeros."""
    return torch.ops.minimegatron.permute(x, slots, places)


def unpermute(
    y: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, probs: torch.Tensor | None = None
) -> torch.Tensor:
    """y [n, h] -> [t, h]: sum over j of probs[t, j] y[places[t, j]]; probs in fp32 (fp64), default 1."""
    if probs is None:
        probs = y.new_ones(places.shape, dtype=accumulator(y.dtype))
    return torch.ops.minimegatron.unpermute(y, slots, places, probs)


def inverse(slots: torch.Tensor, tokens: int, k: int) -> torch.Tensor:
    """places [tokens, k] of slots [n]."""
    places = slots.new_full((tokens * k + 1,), -1)
    rows = torch.arange(slots.numel(), device=slots.device)
    places[torch.where(slots < 0, tokens * k, slots)] = rows  # padding is written behind the end
    return places[:-1].view(tokens, k)


def places_of(wanted: torch.Tensor, row: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a permutation is to these kernels.

    Args:
        wanted: [T, E'] map of some experts.
        row: [E', T] of every pair, garbage where it is not wanted.
        k: at most so many are wanted by a token.

    Returns:
        slot [T, E'] of every pair, token times k plus which of its choices, garbage where it is not wanted; places
        [T, k], the row of every choice or -1.
    """
    tokens = len(wanted)
    slot = wanted.cumsum(1) + torch.arange(-1, tokens * k - 1, k, device=wanted.device)[:, None]
    places = torch.full((tokens * k + 1,), -1, dtype=torch.int64, device=wanted.device)
    places.scatter_(0, slot.where(wanted, tokens * k).flatten(), row.t().flatten())
    return slot, places[:-1].view(tokens, k)


class Permutation:
    """See `ops.Permutation`."""

    def __init__(self, tokens: torch.Tensor, wanted: torch.Tensor, row: torch.Tensor, most: int) -> None:
        self._tokens = tokens
        self._slot, self._places = places_of(wanted, row, most)

    def permute(self, pairs: torch.Tensor) -> torch.Tensor:
        self._slots = self._slot.flatten().index_select(0, pairs)
        return permute(self._tokens, self._slots, self._places)

    def unpermute(self, rows: torch.Tensor) -> torch.Tensor:
        return unpermute(rows, self._slots, self._places)


def _check(op: str, x: torch.Tensor, rows: int | None, slots: torch.Tensor, places: torch.Tensor) -> None:
    checks.float_tensor(op, "x", x)
    require(x.dim() == 2, f"{op}: x is {tuple(x.shape)}", "give [rows, h]")
    require(
        slots.dtype == places.dtype == torch.int64 and slots.dim() == 1 and places.dim() == 2 and places.shape[1] > 0,
        f"{op}: slots {slots.dtype} {tuple(slots.shape)}, places {places.dtype} {tuple(places.shape)}",
        "give int64 slots [n] and places [t, k]",
    )
    require(x.shape[0] == rows, f"{op}: x has {x.shape[0]} rows", f"expected {rows}")


@torch.library.custom_op("minimegatron::permute", mutates_args=(), device_types=("cpu", "cuda"))
def _permute(x: torch.Tensor, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    _check("permute", x, places.shape[0], slots, places)
    return _gather(x, slots, None, places.shape[1])


@_permute.register_fake
def _(x: torch.Tensor, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    _check("permute", x, places.shape[0], slots, places)
    return x.new_empty((slots.shape[0], x.shape[1]))


def _gather(x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None, k: int) -> torch.Tensor:
    x, slots = x.contiguous(), slots.contiguous()
    out = x.new_empty((slots.shape[0], x.shape[1]))
    if out.numel():
        run("permute", "mm_gather_rows", x, x, slots, weights, out, slots.shape[0], k, x.shape[1], DTYPES[x.dtype])
    return out


def _combine(y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    y, places = y.contiguous(), places.contiguous()
    out = y.new_empty((places.shape[0], y.shape[1]))
    if out.numel():
        run("permute", "mm_combine_rows", y, y, places, weights, out, *places.shape, y.shape[1], DTYPES[y.dtype])
    return out


@torch.library.custom_op("minimegatron::permute_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _permute_backward(dout: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return _combine(dout, places, None)


@_permute_backward.register_fake
def _(dout: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return dout.new_empty((places.shape[0], dout.shape[1]))


@torch.library.custom_op("minimegatron::unpermute", mutates_args=(), device_types=("cpu", "cuda"))
def _unpermute(y: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    _check("unpermute", y, slots.shape[0], slots, places)
    _check_probs(y, places, probs)
    return _combine(y, places, probs.contiguous())


def _check_probs(y: torch.Tensor, places: torch.Tensor, probs: torch.Tensor) -> None:
    checks.shape("unpermute", probs=(probs, tuple(places.shape)))
    wide = accumulator(y.dtype)
    require(probs.dtype == wide, f"unpermute: probs are {probs.dtype}", f"give {wide}")


@_unpermute.register_fake
def _(y: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    _check_probs(y, places, probs)
    return y.new_empty((places.shape[0], y.shape[1]))


@torch.library.custom_op("minimegatron::unpermute_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _unpermute_backward(
    dout: torch.Tensor, y: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dy, dprobs)"""
    checks.same("unpermute_backward", y, dout=dout)
    dout, y, places, probs = (t.contiguous() for t in (dout, y, places, probs))
    dprobs = torch.empty_like(probs)
    if dprobs.numel():
        run("permute", "mm_row_dots", y, dout, y, places, dprobs, *places.shape, y.shape[1], DTYPES[y.dtype])
    return _gather(dout, slots, probs, places.shape[1]), dprobs


@_unpermute_backward.register_fake
def _(
    dout: torch.Tensor, y: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return checks.like(y), checks.like(probs)


def _keep_permute(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[2])


def _permute_grads(ctx: Any, dout: torch.Tensor) -> Any:
    return torch.ops.minimegatron.permute_backward(dout, *ctx.saved_tensors), None, None


def _keep_unpermute(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _unpermute_grads(ctx: Any, dout: torch.Tensor) -> Any:
    dy, dprobs = torch.ops.minimegatron.unpermute_backward(dout, *ctx.saved_tensors)
    return dy, None, None, dprobs


_permute.register_autograd(_permute_grads, setup_context=_keep_permute)
_unpermute.register_autograd(_unpermute_grads, setup_context=_keep_unpermute)
