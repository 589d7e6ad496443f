"""Rows of tokens to rows of experts and back. Kernels: `csrc/permute.cu`.

    slots [n]       row i of the permuted tensor is slot t k + j, the j-th choice of token t; -1: a row of padding
    places [t, k]   the inverse: where choice j of token t went; -1: dropped

Each must be the other's inverse: the backward pass of one gathers with the other. `inverse` makes one from the other.
"""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.errors import require
from minimegatron.kernels.operators import (
    DTYPES,
    accumulator,
    check_float,
    check_same,
    check_shape,
    like,
    operator,
    run,
)

Tensor = torch.Tensor


def inverse(slots: Tensor, tokens: int, k: int) -> Tensor:
    """places [tokens, k] of slots [n]."""
    places = slots.new_full((tokens * k + 1,), -1)
    rows = torch.arange(slots.numel(), device=slots.device)
    places[torch.where(slots < 0, tokens * k, slots)] = rows  # padding is written behind the end
    return places[:-1].view(tokens, k)


def places_of(wanted: Tensor, row: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The arguments of these kernels for a permutation.

    Args:
        wanted: [T, E'] map of some experts.
        row: [E', T], the row of every pair, garbage where the pair is not wanted.
        k: the most experts that a token wants.

    Returns:
        slot [T, E'] of every pair, token times k plus the number of the choice, garbage where it is not wanted; places
        [T, k], the row of every choice or -1.
    """
    tokens = len(wanted)
    slot = wanted.cumsum(1) + torch.arange(-1, tokens * k - 1, k, device=wanted.device)[:, None]
    places = torch.full((tokens * k + 1,), -1, dtype=torch.int64, device=wanted.device)
    places.scatter_(0, slot.where(wanted, tokens * k).flatten(), row.t().flatten())
    return slot, places[:-1].view(tokens, k)


class Permutation:
    """See `interfaces.Permutation`."""

    def __init__(self, tokens: Tensor, wanted: Tensor, row: Tensor, most: int) -> None:
        self._tokens = tokens
        self._slot, self._places = places_of(wanted, row, most)

    def permute(self, pairs: Tensor) -> Tensor:
        self._slots = self._slot.flatten().index_select(0, pairs)
        return permute(self._tokens, self._slots, self._places)

    def unpermute(self, rows: Tensor) -> Tensor:
        return unpermute(rows, self._slots, self._places)


def _check(op: str, x: Tensor, rows: int | None, slots: Tensor, places: Tensor) -> None:
    check_float(op, "x", x)
    require(x.dim() == 2, f"{op}: x is {tuple(x.shape)}", "give [rows, h]")
    require(
        slots.dtype == places.dtype == torch.int64 and slots.dim() == 1 and places.dim() == 2 and places.shape[1] > 0,
        f"{op}: slots {slots.dtype} {tuple(slots.shape)}, places {places.dtype} {tuple(places.shape)}",
        "give int64 slots [n] and places [t, k]",
    )
    require(x.shape[0] == rows, f"{op}: x has {x.shape[0]} rows", f"expected {rows}")


def _gather(x: Tensor, slots: Tensor, weights: Tensor | None, k: int) -> Tensor:
    x, slots = x.contiguous(), slots.contiguous()
    out = x.new_empty((slots.shape[0], x.shape[1]))
    if out.numel():
        run("permute", "mm_gather_rows", x, x, slots, weights, out, slots.shape[0], k, x.shape[1], DTYPES[x.dtype])
    return out


def _combine(y: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    y, places = y.contiguous(), places.contiguous()
    out = y.new_empty((places.shape[0], y.shape[1]))
    if out.numel():
        run("permute", "mm_combine_rows", y, y, places, weights, out, *places.shape, y.shape[1], DTYPES[y.dtype])
    return out


@operator("permute_backward", lambda dout, places: dout.new_empty((places.shape[0], dout.shape[1])))
def _permute_backward(dout: Tensor, places: Tensor) -> Tensor:
    return _combine(dout, places, None)


def _keep_permute(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[2])


def _permute_grads(ctx: Any, dout: Tensor) -> Any:
    return _permute_backward(dout, *ctx.saved_tensors), None, None


def _permute_output(x: Tensor, slots: Tensor, places: Tensor) -> Tensor:
    _check("permute", x, places.shape[0], slots, places)
    return x.new_empty((slots.shape[0], x.shape[1]))


@operator("permute", _permute_output, keep=_keep_permute, grads=_permute_grads)
def permute(x: Tensor, slots: Tensor, places: Tensor) -> Tensor:
    """x [t, h] -> [n, h]: row i is token slots[i] // k, or zeros."""
    _check("permute", x, places.shape[0], slots, places)
    return _gather(x, slots, None, places.shape[1])


@operator("unpermute_backward", lambda dout, y, slots, places, probs: (like(y), like(probs)))
def _unpermute_backward(dout: Tensor, y: Tensor, slots: Tensor, places: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """(dy, dprobs)"""
    check_same("unpermute_backward", y, dout=dout)
    dout, y, places, probs = (t.contiguous() for t in (dout, y, places, probs))
    dprobs = torch.empty_like(probs)
    if dprobs.numel():
        run("permute", "mm_row_dots", y, dout, y, places, dprobs, *places.shape, y.shape[1], DTYPES[y.dtype])
    return _gather(dout, slots, probs, places.shape[1]), dprobs


def _keep_unpermute(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _unpermute_grads(ctx: Any, dout: Tensor) -> Any:
    dy, dprobs = _unpermute_backward(dout, *ctx.saved_tensors)
    return dy, None, None, dprobs


def _unpermute_output(y: Tensor, slots: Tensor, places: Tensor, probs: Tensor) -> Tensor:
    _check("unpermute", y, slots.shape[0], slots, places)
    check_shape("unpermute", probs=(probs, tuple(places.shape)))
    wide = accumulator(y.dtype)
    require(probs.dtype == wide, f"unpermute: probs are {probs.dtype}", f"give {wide}")
    return y.new_empty((places.shape[0], y.shape[1]))


@operator("unpermute", _unpermute_output, keep=_keep_unpermute, grads=_unpermute_grads)
def _unpermute(y: Tensor, slots: Tensor, places: Tensor, probs: Tensor) -> Tensor:
    _unpermute_output(y, slots, places, probs)
    return _combine(y, places, probs.contiguous())


def unpermute(y: Tensor, slots: Tensor, places: Tensor, probs: Tensor | None = None) -> Tensor:
    """y [n, h] -> [t, h]: sum over j of probs[t, j] y[places[t, j]]; probs in fp32 (fp64), default 1."""
    if probs is None:
        probs = y.new_ones(places.shape, dtype=accumulator(y.dtype))
    return _unpermute(y, slots, places, probs)  # type: ignore[no-any-return]
