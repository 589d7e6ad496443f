"""Boxes of a rank's part fill the logical tensor, and any cut reads what any other has written."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from minimegatron.checkpoint.commit import Keep, folder_of, read_manifest, verify
from minimegatron.checkpoint.load import read_tensors
from minimegatron.checkpoint.regions import Logical, Region, boxes_of_slice, regions
from minimegatron.checkpoint.save import save
from minimegatron.comm.axis import ALONE
from minimegatron.errors import CheckpointError
from minimegatron.layers.param import ParamLayout
from tests.checkpoint.canary import canary

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4)


@hypothesis.given(SHAPES, st.data())
def test_boxes_of_a_slice_are_its_elements_in_order(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    places = torch.arange(size).view(shape)
    at = start
    for box, where in boxes_of_slice(shape, start, stop):
        assert where.start == at
        inside = places[tuple(slice(*dim) for dim in box)]
        assert inside.flatten().tolist() == list(range(where.start, where.stop))
        at = where.stop
    assert at == stop


@dataclasses.dataclass(frozen=True)
class Cut:
    """How ranks hold one logical tensor: over tp, over ep, and flattened over dp."""

    tp: int
    ep: int
    dp: int


@st.composite
def stacks(draw) -> tuple[tuple[int, ...], int, int | None, int | None]:
    """(shape, blocks of the cut dim, cut dim, rows that mean something) that cuts of 1, 2 and 4 divide."""
    experts = draw(st.booleans())
    blocks = draw(st.sampled_from([1, 2]))
    dims = draw(st.integers(2 if experts else 1, 3))
    shape = [draw(st.integers(1, 3)) for _ in range(dims)]
    dim = draw(st.sampled_from([None, *range(int(experts), dims)]))
    if dim is not None:
        shape[dim] = 4 * blocks * draw(st.integers(1, 2))
    if experts:
        shape[0] = 4
    rows = draw(st.integers(1, shape[0])) if not experts and dim == 0 and blocks == 1 else None
    return tuple(shape), blocks, dim, rows if not experts else -1


def held(stack, cut: Cut) -> list[tuple[ParamLayout, slice]]:
    """(layout, elements of the flattened local part) of every rank."""
    shape, blocks, dim, rows = stack
    ranges = ()
    tp = cut.tp if dim is not None else 1
    if dim is not None:
        block = shape[dim] // blocks
        n = block // tp
        ranges = tuple(tuple((k * block + r * n, k * block + (r + 1) * n) for k in range(blocks)) for r in range(tp))
    found = []
    for r, e in itertools.product(range(tp), range(cut.ep if rows == -1 else 1)):
        here = (e * 4 // cut.ep, (e + 1) * 4 // cut.ep) if rows == -1 else None
        layout = ParamLayout(shape, dim, ranges, r, rows=None if rows == -1 else rows, experts=here)
        size = math.prod(layout.local_shape)
        for d in range(cut.dp):
            found.append((layout, slice(d * size // cut.dp, (d + 1) * size // cut.dp)))
    return found


def parts_of(stack, cut: Cut, fill: str | None) -> list[Region]:
    """Regions of all ranks; with the numbers of the tensor `fill`, or with -1, the padding always with NaN."""
    found = []
    for layout, piece in held(stack, cut):
        flat = torch.full((piece.stop - piece.start,), math.nan)
        for part in regions(layout, flat, piece):
            part.data.copy_(canary(fill, layout.unpadded_shape, part.box, torch.float32) if fill else -1)
            found.append(part)
    return list({part.box: part for part in found}.values())


CUTS = st.builds(Cut, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 5))


def round_trip(root: Path, tensors, cuts) -> None:
    before = cuts[0]
    for step, cut in enumerate(cuts, 1):
        shapes = [held(stack, cut)[0][0].unpadded_shape for stack in tensors]
        if step == 1:
            parts = [parts_of(stack, cut, f"t{i}") for i, stack in enumerate(tensors)]
        else:
            parts = [parts_of(stack, cut, None) for stack in tensors]
        table = {f"t{i}": Logical(shapes[i], parts[i], torch.float32) for i in range(len(tensors))}
        if step > 1:
            manifest = read_manifest(root, step - 1)
            verify(folder_of(root, step - 1), manifest)
            read_tensors(table, folder_of(root, step - 1), manifest, ALONE)
        for i, found in enumerate(parts):
            for part in found:
                assert torch.equal(part.data, canary(f"t{i}", tuple(shapes[i]), part.box, torch.float32)), (before, cut)
        save(root, step, "run", table, {}, ALONE, Keep())
        before = cut


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return (tmp_path_factory.mktemp("trip") for _ in itertools.count())


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.lists(stacks(), min_size=1, max_size=3), CUTS, CUTS)
def test_any_cut_reads_what_any_other_has_written(places, tensors, a, b):
    round_trip(next(places), tensors, [a, b, a])


@pytest.mark.thorough
@hypothesis.settings(max_examples=500)
@hypothesis.given(st.lists(stacks(), min_size=1, max_size=3), CUTS, CUTS)
def test_any_cut_reads_what_any_other_has_written_500_times(places, tensors, a, b):
    round_trip(next(places), tensors, [a, b, a])


def test_a_region_that_nobody_has_is_refused_before_anything_is_published(tmp_path):
    part = Region(((0, 2),), torch.zeros(2))
    for parts, words in ([part], "has 2 of the 3"), ([part, Region(((1, 2),), torch.zeros(1))], "twice"):
        with pytest.raises(CheckpointError, match=words):
            save(tmp_path, 1, "run", {"t": Logical((3,), parts, torch.float32)}, {}, ALONE, Keep())
        assert not list(tmp_path.iterdir())
