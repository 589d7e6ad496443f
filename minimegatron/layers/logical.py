"""The logical tensors of a model: initial values, loading and gathering, from each parameter's layout (`layers/param`).

| function         | from                                | to                                                          |
|------------------|-------------------------------------|-------------------------------------------------------------|
| `draw_part`      | (seed, name, logical shape)         | this rank's part of the initial values                      |
| `initialize`     | a model, also on the meta device    | the same logical model in every layout                      |
| `load_logical`   | logical name -> tensor              | every parameter of this rank, or an error that lists all    |
| `gather_logical` | a rank's part (of values, gradients)| the logical tensor, on every rank                           |

Communication: `gather_logical` all-gathers over tp (experts: over etp, then ep); the others send nothing.

**Initial values** are a function of (seed, name, logical shape), so they are equal in every layout. A tensor of up to
`WHOLE` numbers is drawn whole from one stream of torch's. A larger matrix is drawn in tiles of 256 x 256, each from its
own stream, so that a rank draws only what it holds; if each of 64 ranks drew all 70 billion numbers of a model,
training would begin nine minutes late.

    tile (i, j)  =  normal(stream(hash(seed, name, i, j)))        256 x 256, less at the edges

Each number costs 10 ns (14 ns where a part of many tiles is thrown away), a new stream 8,000 ns: a hundredth of a tile.
A stream is numpy's SFC64, whose 256 bits of state are a hash, so no two streams overlap. numpy makes normal numbers of
it by the ziggurat method (Marsaglia & Tsang 2000), in integers and one product, so they do not depend on how a machine
computes a logarithm, but for one in a few thousand.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_gather
from minimegatron.errors import CheckpointError
from minimegatron.layers.param import ParamLayout, Ranges, layout_of, logical_parameters, new_parameter

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
# ---------------------------------------------------------------------------------------------- initial values


def draw(name: str, layout: ParamLayout, seed: int) -> torch.Tensor:
    """The logical tensor's initial values in fp32, a function of (seed, name, logical shape) alone."""
    experts = None if layout.experts is None else (0, layout.shape[0])
    return draw_part(name, dataclasses.replace(layout, dim=None, parts=(), experts=experts), seed)


def draw_part(name: str, layout: ParamLayout, seed: int) -> torch.Tensor:
    """This rank's part of `draw`; of a stack of experts only its own are drawn, of a large matrix only its tiles."""
    if layout.experts is not None:
        return torch.stack([draw_part(f"{name}.{e}", layout.one_expert, seed) for e in range(*layout.experts)])
    shape = layout.unpadded_shape
    if layout.init.std == 0.0:
        return layout.take(_padded(torch.full(shape, layout.init.value, device="cpu"), layout))
    if not is_tiled(shape):
        return layout.take(_padded(_made(one_stream(name, seed, shape) * layout.init.std, layout), layout))
    cuts: list[Ranges] = [((0, length),) for length in layout.shape]
    if layout.dim is not None:
        cuts[layout.dim] = layout.parts[layout.rank]
    rows = tuple((min(a, shape[0]), min(b, shape[0])) for a, b in cuts[0])
    assert all(b - a == d - c for (a, b), (c, d) in zip(cuts[0][:-1], rows[:-1], strict=True)), "padding is at the end"
    values = tiles(name, seed, (shape[0], shape[1]), rows, cuts[1]).mul_(layout.init.std)
    return _padded(_made(values, layout), layout, layout.local_shape[0])


def _made(values: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
    return values if layout.init.of is None else layout.init.of(values)


def _padded(values: torch.Tensor, layout: ParamLayout, rows: int | None = None) -> torch.Tensor:
    """`values` with zeros after them, up to the rows of the layout or to `rows`."""
    missing = (layout.shape[0] if rows is None else rows) - len(values) if values.dim() else 0
    return torch.cat([values, values.new_zeros((missing, *values.shape[1:]))]) if missing else values


@torch.no_grad()
def initialize(model: nn.Module, seed: int, device: torch.device | str | None = None) -> None:
    """Give every parameter its initial value; the logical model is the same in every layout and on every device.

    Args:
        model: its parameters have layouts.
        seed: seed of the whole model.
        device: where the model goes; parameters on the meta device get their memory there.
    """
    if device is not None:
        materialize(model, device)
        model.to(device)
    for name, param in logical_parameters(model):
        param.copy_(draw_part(name, layout_of(param), seed))


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Give parameters on the meta device memory on `device`; others stay where they are.

    `nn.Module.to_empty` would make new parameters without their layouts, and untie tied ones.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is None or not param.is_meta:
                continue
            if param not in made:
                with torch.device(device):
                    made[param] = new_parameter(layout_of(param), param.dtype)
                made[param].requires_grad_(param.requires_grad)
            module._parameters[name] = made[param]


# ---------------------------------------------------------------------------------------------- logical tensors


@torch.no_grad()
def gather_logical(tensor: torch.Tensor, layout: ParamLayout, mesh: Mesh | Axis) -> torch.Tensor:
    """The logical tensor of a parameter (or of its gradient), on every rank; all of tp (etp and ep) must call it.

    Args:
        tensor: this rank's part.
        layout: the parameter's layout.
        mesh: the mesh; without experts its tp axis suffices.

    Returns:
        The tensor without padding rows.
    """
    cut_over = mesh if isinstance(mesh, Axis) else mesh.tp
    if layout.experts is not None:
        assert not isinstance(mesh, Axis), "experts are gathered over two axes: pass the mesh"
        cut_over = mesh.etp
    parts = [tensor.detach()] if not layout.sharded else list(all_gather(tensor.detach()[None], cut_over).unbind(0))
    full = layout.join(parts)
    if layout.experts is not None:
        assert not isinstance(mesh, Axis)
        full = all_gather(full, mesh.ep)
    return full if layout.rows is None else full[: layout.rows]


def part_of_logical(full: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
    """This rank's part of a logical tensor without padding rows, which are added as zeros."""
    return layout.take(_padded(full, layout))


@torch.no_grad()
def load_logical(model: nn.Module, tensors: Mapping[str, torch.Tensor], *, stage: bool = False) -> None:
    """Fill the model from logical tensors; every parameter must have one, with its exact shape, and no tensor may be
    left.

    Args:
        model: a whole model, or with `stage` the pipeline stages of this rank: then tensors of other stages are
            skipped.
        tensors: logical name -> tensor, padding rows left out.

    Raises:
        CheckpointError: listing every missing, unexpected and misshapen tensor at once.
    """
    params = dict(logical_parameters(model))
    problems = [f"missing {n}" for n in params if n not in tensors]
    problems += [f"unexpected {n} {tuple(tensors[n].shape)}" for n in tensors if n not in params and not stage]
    for name in params.keys() & tensors.keys():
        layout = layout_of(params[name])
        want = layout.unpadded_shape
        if tuple(tensors[name].shape) != tuple(want):
            problems.append(f"{name} has shape {tuple(tensors[name].shape)}, the model wants {tuple(want)}")
    if problems:
        raise CheckpointError(
            "the tensors do not fit the model:\n  " + "\n  ".join(sorted(problems)), fix="load the model they belong to"
        )
    for name, param in params.items():
        param.copy_(part_of_logical(tensors[name], layout_of(param)))


# ---------------------------------------------------------------------------------------------- normal numbers in tiles

TILE = 256
WHOLE = 1 << 22


def is_tiled(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this logical shape is drawn in tiles."""
    return len(shape) == 2 and math.prod(shape) > WHOLE


def key_of(*words: object, size: int = 8) -> int:
    """A number of `size` bytes hashed from words, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(":".join(map(str, words)).encode(), digest_size=size).digest(), "little")


def one_stream(name: str, seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Normal numbers of mean 0 and variance 1, in fp32, from one stream."""
    generator = torch.Generator("cpu").manual_seed(key_of(seed, name) >> 1)
    return torch.randn(shape, generator=generator, device="cpu")


def tiles(name: str, seed: int, shape: tuple[int, int], rows: Ranges, columns: Ranges) -> torch.Tensor:
    """A part of the matrix of normal numbers that belongs to (seed, name, shape).

    Args:
        name, seed, shape: of the whole matrix.
        rows, columns: ranges of it, in the order in which they are stored.

    Returns:
        [sum of rows, sum of columns] in fp32, mean 0 and variance 1.
    """
    part = np.empty((_length(rows), _length(columns)), dtype=np.float32)
    space = np.empty(TILE * TILE, dtype=np.float32)
    for i, from_rows, to_rows in _cuts(rows):
        for j, from_columns, to_columns in _cuts(columns):
            size = min(TILE, shape[0] - i * TILE), min(TILE, shape[1] - j * TILE)
            stream = np.random.Generator(np.random.SFC64(key_of(seed, name, i, j, size=16)))
            tile = space[: size[0] * size[1]]
            stream.standard_normal(dtype=np.float32, out=tile)
            part[to_rows, to_columns] = tile.reshape(size)[from_rows, from_columns]
    return torch.from_numpy(part)


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _cuts(ranges: Ranges) -> list[tuple[int, slice, slice]]:
    """The overlap of ranges and tiles along one dim: (number of the tile, its indices, indices of the result)."""
    cuts, at = [], 0
    for start, stop in ranges:
        for i in range(start // TILE, -(-stop // TILE)):
            a, b = max(start, i * TILE), min(stop, (i + 1) * TILE)
            cuts.append((i, slice(a - i * TILE, b - i * TILE), slice(at, at + b - a)))
            at += b - a
    return cuts
