"""The boxes of the logical tensor that a rank holds.

The problem in a sentence: a checkpoint of rank 1 of 4 is of no use to rank 0 of 3, but boxes of the whole tensor are,
because what a rank wants is the sum of its intersections with the boxes that were written.

A rank's part of a parameter is cut up to three times, and each cut leaves boxes:

| cut                      | given by              | leaves                                                        |
|--------------------------|-----------------------|---------------------------------------------------------------|
| experts over ep          | `ParamLayout.experts` | a range of dim 0                                              |
| a dim over tp, etp       | `ParamLayout.parts`   | a box for each range: gate and up of a stacked matrix are two |
| the flattened part, ZeRO | a slice               | the end of a row, whole rows, the start of a row, in each dim |

    a rank's [4, 3], elements 2 to 10 of it        . . x
                                                   x x x      three boxes: [0:1, 2:3], [1:3, 0:3], [3:4, 0:1]
                                                   x x x
                                                   x . .

Padding of the vocabulary is not part of the logical tensor: its rows depend on tp, so no box has them.

Megatron-LM: `ShardedTensor` in `megatron/core/dist_checkpointing/mapping.py`, which gathers flattened shards before it
saves them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch

from minimegatron.layers.param import ParamLayout

Box = tuple[tuple[int, int], ...]  # (start, stop) in each dim


@dataclasses.dataclass(frozen=True)
class Region:
    """A box of the logical tensor and the memory of its numbers.

    Attributes:
        box: the ranges of its dims.
        data: a view of this rank's tensor, of the box's shape.
    """

    box: Box
    data: torch.Tensor

    @property
    def sizes(self) -> torch.Size:
        return torch.Size(stop - start for start, stop in self.box)


def boxes_of_slice(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, slice]]:
    """The boxes that consist of elements [start, stop) of a flattened tensor, each with its range of elements, in
    order."""
    if start >= stop:
        return
    if not shape:
        yield (), slice(start, stop)
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    inside = (0, row) if len(shape) > 1 else (0, 1)
    if first == last and (start - first * row, stop - first * row) != inside:
        for box, where in boxes_of_slice(shape[1:], start - first * row, stop - first * row):
            yield ((first, first + 1), *box), slice(where.start + first * row, where.stop + first * row)
        return
    head, tail = -(-start // row), stop // row
    if start < head * row:
        yield from boxes_of_slice(shape, start, head * row)
    if head < tail:
        yield ((head, tail), *((0, n) for n in shape[1:])), slice(head * row, tail * row)
    if tail * row < stop:
        yield from boxes_of_slice(shape, tail * row, stop)


def regions(layout: ParamLayout, data: torch.Tensor, piece: slice | None = None) -> list[Region]:
    """The regions of the logical tensor that a rank's tensor holds.

    Args:
        layout: the parameter's layout.
        data: of the layout's local shape; with a `piece` those elements of it, flattened.
        piece: elements of the flattened local tensor.
    """
    local = layout.local_shape
    if piece is None:
        boxes = [(tuple((0, n) for n in local), data)]
    else:
        flat = data.view(-1)
        boxes = [
            (box, flat[where.start - piece.start : where.stop - piece.start].view([b - a for a, b in box]))
            for box, where in boxes_of_slice(local, piece.start, piece.stop)
        ]
    result = []
    for box, view in boxes:
        for local_range, logical_range in _ranges(layout):
            region = _moved(box, view, layout, local_range, logical_range)
            if region is not None:
                result.append(region)
    return result


def _ranges(layout: ParamLayout) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """(range of the cut dim here, range in the logical tensor); one range of everything if no dim is cut."""
    if layout.dim is None:
        yield (0, 0), (0, 0)
        return
    at = 0
    for start, stop in layout.parts[layout.rank]:
        yield (at, at + stop - start), (start, stop)
        at += stop - start


def _moved(
    box: Box, view: torch.Tensor, layout: ParamLayout, local_range: tuple[int, int], logical_range: tuple[int, int]
) -> Region | None:
    """The part of a local box in this range of the cut dim, in coordinates of the logical tensor."""
    cut = list(box)
    if layout.dim is not None:
        start, stop = max(cut[layout.dim][0], local_range[0]), min(cut[layout.dim][1], local_range[1])
        if start >= stop:
            return None
        view = view.narrow(layout.dim, start - cut[layout.dim][0], stop - start)
        cut[layout.dim] = (start - local_range[0] + logical_range[0], stop - local_range[0] + logical_range[0])
    if layout.experts is not None:
        cut[0] = (cut[0][0] + layout.experts[0], cut[0][1] + layout.experts[0])
    if layout.rows is not None and cut[0][1] > layout.rows:
        if cut[0][0] >= layout.rows:
            return None
        view = view[: layout.rows - cut[0][0]]
        cut[0] = (cut[0][0], layout.rows)
    return Region(tuple(cut), view)


@dataclasses.dataclass(frozen=True)
class Logical:
    """A logical tensor of which this rank holds some regions.

    Attributes:
        shape: shape of the logical tensor.
        parts: the regions of this rank; empty if it holds nothing of the tensor.
        dtype: dtype of all regions.
    """

    shape: Sequence[int]
    parts: Sequence[Region]
    dtype: torch.dtype
