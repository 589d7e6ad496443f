"""Normal numbers of a large matrix, of which a rank draws what it holds.

The problem in a sentence: a matrix must start the same in every layout, and a stream of random numbers has no middle
to begin in; 64 ranks that each draw all of 70 billion numbers, to keep a part, begin to train nine minutes late.

So a matrix is cut into tiles of 256 x 256, wherever its ranks may be, and every tile has a stream of its own:

    tile (i, j)  =  normal(stream(hash(seed, name, i, j)))        256 x 256, less at the edges

A part of rows or of columns costs what it holds, and at its edges the rest of some tiles: 10 ns a number, 14 where a
part of many tiles is thrown away; to begin a stream costs 8,000 ns, a hundredth of a tile. The stream is numpy's SFC64,
whose 256 bits of state begin at a hash: of all tiles of all models no two will ever overlap. numpy makes normal numbers
of it by a table (ziggurat; Marsaglia & Tsang 2000), with integers and one product, so they do not depend on how a
machine computes a logarithm, but for one in a few thousand.

Matrices of up to `WHOLE` numbers, and what is no matrix, are one stream of torch's: some hundredths of a second.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

Ranges = tuple[tuple[int, int], ...]  # (start, stop) of each piece, along one dim
TILE = 256
WHOLE = 1 << 22


def is_tiled(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this logical shape is drawn in tiles."""
    return len(shape) == 2 and math.prod(shape) > WHOLE


def key_of(*words: object, size: int = 8) -> int:
    """A number of `size` bytes from words, the same on every machine."""
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
    """Where ranges meet tiles of one dim: (number of the tile, which of its places, where they go)."""
    found, at = [], 0
    for start, stop in ranges:
        for i in range(start // TILE, -(-stop // TILE)):
            a, b = max(start, i * TILE), min(stop, (i + 1) * TILE)
            found.append((i, slice(a - i * TILE, b - i * TILE), slice(at, at + b - a)))
            at += b - a
    return found
