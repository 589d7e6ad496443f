"""Lab 08, regions: which boxes of the logical tensor a rank holds, and a box assembled from stored ones.

Files are read through a memory that counts (`labkit.hbm`): a program that reads a whole file, a
whole region, or a number twice gets the right tensor and is recognised by its reads.
"""

from __future__ import annotations

from typing import Any

import torch

from labkit.exercises import Answer, Case, Draw, Exercise

Box = list[list[int]]
FILES = tuple(f"shard_{rank}" for rank in range(4))


def boxes_of(rows: int, columns: int, dim: int, parts: int, part: int, start: int, stop: int) -> list[Box]:
    size = [rows, columns]
    size[dim] //= parts
    offset = [0, 0]
    offset[dim] = part * size[dim]
    width, found, at = size[1], list[Box](), start
    while at < stop:
        row, column = divmod(at, width)
        if column or stop - at < width:
            end = min(stop, (row + 1) * width)
            here = [[row, row + 1], [column, column + end - at]]
        else:
            end = at + (stop - at) // width * width
            here = [[row, end // width], [0, width]]
        found.append([[a + o, b + o] for (a, b), o in zip(here, offset, strict=True)])
        at = end
    return found


def _piece(draw: Draw) -> dict[str, Any]:
    dim, parts = draw.integer(0, 1), draw.integer(2, 4)
    size = [draw.integer(2, 6), draw.integer(2, 6)]
    start, stop = sorted(draw.random.sample(range(size[0] * size[1] + 1), 2))
    size[dim] *= parts
    return {"rows": size[0], "columns": size[1], "dim": dim, "parts": parts, "part": draw.integer(0, parts - 1),
            "start": start, "stop": stop}  # fmt: skip


_EXAMPLE = {"rows": 4, "columns": 6, "dim": 1, "parts": 2, "part": 1, "start": 2, "stop": 10}
_WHOLE = {**_EXAMPLE, "part": 0, "start": 0, "stop": 12}
_BY_ROWS = {"rows": 6, "columns": 4, "dim": 0, "parts": 3, "part": 2, "start": 1, "stop": 6}
_BOXES = [
    {**_EXAMPLE, "start": 1, "stop": 2}, {**_EXAMPLE, "start": 3, "stop": 6}, {**_EXAMPLE, "start": 4, "stop": 4},
    {**_EXAMPLE, "start": 1, "stop": 4}, {**_EXAMPLE, "start": 3, "stop": 8}, {**_EXAMPLE, "start": 1, "stop": 6},
    {**_EXAMPLE, "start": 0, "stop": 1}, {**_EXAMPLE, "start": 2, "stop": 3}, {**_EXAMPLE, "start": 5, "stop": 7},
    {**_EXAMPLE, "start": 0, "stop": 11, "part": 0}, {**_EXAMPLE, "start": 0, "stop": 0}, _BY_ROWS,
    {**_EXAMPLE, "start": 1, "stop": 12}, {"rows": 5, "columns": 3, "dim": 1, "parts": 3, "part": 2, "start": 1,
                                           "stop": 4},
    {"rows": 6, "columns": 5, "dim": 0, "parts": 3, "part": 1, "start": 4, "stop": 9},
]  # fmt: skip


BOXES = Exercise(
    "boxes_of",
    reference=boxes_of,
    cases=[
        Case("the example: [4, 6] cut by columns into 2, numbers 2 to 10 of part 1", _EXAMPLE),
        Case("all of part 0", _WHOLE, fixed=[_BY_ROWS]),
        Case("other pieces", _piece, points=2, hidden=True, fixed=_BOXES),
    ],
    idea="Walk along the piece: are you in the middle of a row, at the start of whole rows, or in a row that is cut?",
    hint="width is the part's number of columns. At `at` with (row, column) = divmod(at, width): if column is not 0 or "
    "fewer than width numbers are left, the box is the rest of this row, at most to stop; else it is all (stop - at) "
    "// width whole rows. At the end add part * size to the range of the dim that is cut.",
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------- load a box


def load_box(regions: list[Any], box: Box, hole: bool = False, **files: torch.Tensor) -> dict[str, Any]:
    """The box. The judge's own answer reads whole files."""
    (top, bottom), (left, right) = box
    if hole:
        return {"box": "a ValueError"}
    whole = torch.full((max(r[2][0][1] for r in regions), max(r[2][1][1] for r in regions)), torch.nan)
    for file, at, ((r0, r1), (c0, c1)) in regions:
        whole[r0:r1, c0:c1] = files[file][at : at + (r1 - r0) * (c1 - c0)].view(r1 - r0, c1 - c0)
    return {"box": whole[top:bottom, left:right]}


def _drive(exercise: Any, regions: Any, box: Any, hole: bool, **files: Any) -> Any:
    from labkit.hbm import Memory
    from labkit.tools import note

    memory = Memory(**files)
    note("memory", memory.evidence())
    if not hole:
        return {"box": exercise.load_box(memory, regions, box)}
    try:
        exercise.load_box(memory, regions, box)
    except ValueError:
        return {"box": "a ValueError"}
    return {"box": "numbers, though some of them were never stored"}


def _meeting(inputs: dict[str, Any]) -> list[Box]:
    """The intersections of the box with the regions."""
    found = []
    for _, _, region in inputs["regions"]:
        one = [[max(a, c), min(b, d)] for (a, b), (c, d) in zip(region, inputs["box"], strict=True)]
        if all(a < b for a, b in one):
            found.append(one)
    return found


def _reads(answer: Answer) -> str | None:
    [memory] = answer.evidence[0].notes["memory"]
    loads = [tuple(one[1:]) for one in memory["order"]]
    meeting = _meeting(answer.inputs)
    wanted, rows = sum((b - a) * (d - c) for (a, b), (c, d) in meeting), sum(b - a for (a, b), _ in meeting)
    read = sum(memory["loaded"].values())
    if read > wanted:
        numbers = [(file, n) for file, first, last in loads for n in range(first, last)]
        if len(set(numbers)) < len(numbers):
            return f"it reads {len(numbers) - len(set(numbers))} numbers more than once"
        return f"it reads {read} numbers; {wanted} of what is stored lie in the box. Read no more than those"
    if read < wanted:
        return f"it reads {read} numbers; {wanted} of what is stored lie in the box"
    if len(loads) > rows:
        return f"it reads {len(loads)} times; the numbers of a row lie side by side: {rows} times are enough"
    return None


def stored(shape: tuple[int, int], pieces: list[list[Box]], before: int = 0, order: int = 1) -> dict[str, Any]:
    """Files and regions: the boxes of each rank one after the other in its file, after the numbers of another
    tensor."""
    whole = torch.arange(float(shape[0] * shape[1])).view(shape)
    files, regions = {name: torch.tensor([-1.0]) for name in FILES}, []
    for name, boxes in zip(FILES, pieces, strict=False):
        parts = [torch.full((before,), -1.0)]
        for (r0, r1), (c0, c1) in boxes[::order]:
            regions.append([name, sum(map(len, parts)), [[r0, r1], [c0, c1]]])
            parts.append(whole[r0:r1, c0:c1].flatten())
        files[name] = torch.cat([*parts, torch.full((2,), -1.0)])
    return {"regions": regions[::order], **files}


def _layout(rows: int, columns: int, dim: int, parts: int, pieces: int) -> list[list[Box]]:
    """The boxes of each rank: the tensor is cut along a dim, and the elements of each part are dealt out evenly."""
    share = rows * columns // parts // pieces
    return [
        boxes_of(rows, columns, dim, parts, part, i * share, (i + 1) * share)
        for part in range(parts)
        for i in range(pieces)
    ]


def _some(draw: Draw) -> dict[str, Any]:
    dim, (parts, pieces) = draw.integer(0, 1), draw.choice([(2, 2), (4, 1), (1, 4), (1, 2)])
    rows, columns = 4 * draw.integer(2, 3), 4 * draw.integer(2, 3)
    box = [sorted(draw.random.sample(range(n + 1), 2)) for n in (rows, columns)]
    return {**stored((rows, columns), _layout(rows, columns, dim, parts, pieces), draw.integer(0, 5)), "box": box,
            "hole": False}  # fmt: skip


def _wanted(box: Box, *layout: int, before: int = 3, order: int = 1) -> dict[str, Any]:
    rows, columns, *cut = layout
    return {**stored((rows, columns), _layout(rows, columns, *cut), before, order), "box": box, "hole": False}


def _with_a_hole(at: int, box: Box, *layout: int) -> dict[str, Any]:
    """Inputs without one region: its shard was never written."""
    inputs = _wanted(box, *layout)
    del inputs["regions"][at]
    return {**inputs, "hole": True}


def _holes(draw: Draw) -> dict[str, Any]:
    return _with_a_hole(draw.integer(0, 3), [[0, 4], [0, 8]], 4, 8, 1, 4, 1)


_TWO = {**stored((2, 4), [[[[0, 2], [0, 2]]], [[[0, 2], [2, 4]]]]), "box": [[0, 2], [1, 3]], "hole": False}
_ONE_MISSING = {**_TWO, "regions": _TWO["regions"][:1], "hole": True}
_FIXED = [
    _wanted([[0, 4], [0, 6]], 4, 6, 1, 2, 2), _wanted([[1, 3], [2, 5]], 4, 6, 1, 2, 2, order=-1),
    _wanted([[2, 3], [1, 2]], 6, 4, 0, 3, 1), _wanted([[1, 6], [0, 4]], 6, 4, 0, 2, 2, before=0),
    _wanted([[0, 3], [3, 4]], 3, 4, 0, 1, 4), _wanted([[2, 5], [0, 1]], 6, 2, 1, 2, 2),
    # regions below and to the right of the box stand before those that it needs
    _wanted([[0, 2], [1, 4]], 8, 4, 0, 2, 2, order=-1), _wanted([[1, 3], [0, 2]], 4, 8, 1, 4, 1, order=-1),
]  # fmt: skip
_NAN = _wanted([[0, 2], [0, 4]], 2, 4, 1, 2, 1)  # a stored number may be any number
_NAN["shard_1"][4] = torch.nan


LOAD = Exercise(
    "load_box",
    reference=load_box,
    drive=_drive,
    cases=[
        Case("[2, 4] in two files, columns 0 to 2 and 2 to 4; wanted are columns 1 to 3", _TWO),
        Case("the second file is not there: refused with a ValueError", _ONE_MISSING),
        Case("other layouts, other boxes", _some, points=2, hidden=True, draws=3, fixed=[*_FIXED, _NAN]),
        Case("no number is read that is not wanted, in as few reads as there are rows", _some, points=2, hidden=True,
             draws=3, accept=[_reads], fixed=_FIXED),
        Case("what is in no region is refused", _holes, hidden=True, fixed=[
            _with_a_hole(0, [[0, 4], [0, 6]], 4, 6, 1, 2, 2), _with_a_hole(-1, [[3, 4], [5, 6]], 4, 6, 1, 2, 2)]),
    ],
    errors={"ValueError": "A ValueError, though every number of this box is in a region."},
    idea="For one region: which rows and columns does it share with the box, and where in the file is the first one?",
    hint="first, last = max(top, r0), min(bottom, r1), the same for columns a, b; where both are not empty, for "
    "each row: start = at + (row - r0) * (c1 - c0) + a - c0; load start to start + b - a into "
    "found[row - top, a - left : b - left]. Count what was filled; raise ValueError if it is less than the box.",
)  # fmt: skip
