from labkit.answers import Edit

_LOAD = "memory.load(file, start, start + last - first)"

WRONG = [
    # whole files, whole regions, whole rows
    Edit(
        _LOAD,
        "memory.load(file, 0, at + (r1 - r0) * (c1 - c0))[start : start + last - first]",
        told="more than once | Read no more",
    ),
    Edit(
        _LOAD,
        "memory.load(file, at, at + (r1 - r0) * (c1 - c0))[start - at : start - at + last - first]",
        told="more than once | Read no more",
    ),
    Edit(
        _LOAD,
        "memory.load(file, start - first + c0, start - first + c1)[first - c0 : last - c0]",
        told="Read no more",
    ),
    # one number at a time
    Edit(
        _LOAD,
        "torch.cat([memory.load(file, n, n + 1) for n in range(start, start + last - first)])",
        told="side by side",
    ),
    Edit(_LOAD, f"({_LOAD}, {_LOAD})[1]", told="more than once"),
    Edit("start = at + (row", "start = (row", mistake="A region begins in its file where `at` says; before it lie numbers of others."),
    Edit(
        "torch.empty(",
        "torch.zeros(",
        (
            '    if filled < found.numel():\n        raise ValueError(f"{found.numel() '
            '- filled} numbers of {box} are in no region")\n',
            "",
        ),
        mistake="Where nothing was stored it returns zeros, or what was in memory. A run that begins with them " "trains on without an error.",
    ),
    Edit("(row - r0) * (c1 - c0)", "(row - r0) * (right - left)"),
    Edit("+ first - c0\n", "\n"),
    Edit("raise ValueError(", "print(", mistake="Where nothing was stored it returns zeros, or what was in memory. A run that begins with them " "trains on without an error."),
    Edit("filled < found.numel()", "filled == 0"),
    Edit("if first >= last:", "if False:", told="an empty read"),
    Edit("range(max(top, r0), min(bottom, r1))", "range(top, bottom)"),
    Edit("found[row - top,", "found[row - r0,"),
    Edit("for file, at, ((r0, r1), (c0, c1)) in regions:", "for file, at, ((r0, r1), (c0, c1)) in regions[:1]:"),
    # regions that contain the box alone
    Edit("if first >= last:", "if c0 > left or c1 < right:"),
]

RIGHT = [
    Edit(
        "found[row - top, first - left : last - left] = memory.load(file, start, start + last - first)",
        "found[row - top].narrow(0, first - left, last - first).copy_(" + _LOAD + ")",
    ),
    Edit("filled < found.numel()", "filled != (bottom - top) * (right - left)"),
    # rows of one region, full width, in one read
    Edit(
        "        for row in range(max(top, r0), min(bottom, r1)):\n",
        "        high, low = max(top, r0), min(bottom, r1)\n        if high < low and (first, last) == (c0, c1):\n"
        "            begin, many = at + (high - r0) * (c1 - c0), (low - high) * (c1 - c0)\n            "
        "found[high - top : low - top, first - left : last - left] = memory.load(file, begin, begin + many).view("
        "low - high, -1)\n            filled += many\n            continue\n        for row in range(high, low):\n",
    ),
]


# %% right: pieces of rows by their places; a second tensor notes which numbers were stored
import torch


def load_box(memory, regions, box):
    found = torch.full([stop - start for start, stop in box], torch.nan)
    stored = torch.zeros_like(found, dtype=torch.bool)
    for file, at, region in regions:
        both = [range(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, region)]
        width = region[1][1] - region[1][0]
        for row in both[0]:
            if both[1]:
                first = at + (row - region[0][0]) * width + both[1].start - region[1][0]
                here = slice(both[1].start - box[1][0], both[1].stop - box[1][0])
                stored[row - box[0][0], here] = True
                found[row - box[0][0], here] = memory.load(file, first, first + len(both[1]))
    if not stored.all():
        raise ValueError("a region is missing")
    return found


# %% right: a plan, sorted, then one cat
import torch


def load_box(memory, regions: list, box: list[list[int]]) -> torch.Tensor:
    (r0, r1), (c0, c1) = box
    plan = []
    for file, at, ((a, b), (c, d)) in regions:
        for row in range(a, b):
            if r0 <= row < r1 and c < c1 and c0 < d:
                lo, hi = max(c, c0), min(d, c1)
                plan.append((row, lo, hi, file, at + (row - a) * (d - c) + lo - c))
    if sum(hi - lo for _, lo, hi, *_ in plan) != (r1 - r0) * (c1 - c0):
        raise ValueError("a hole: nothing is read")
    plan.sort()
    return torch.cat([memory.load(file, first, first + hi - lo) for _, lo, hi, file, first in plan]).reshape(r1 - r0, c1 - c0)


# %% right: number by number in a dict
import torch


def load_box(memory, regions: list, box: list[list[int]]) -> torch.Tensor:
    (r0, r1), (c0, c1) = box
    numbers = {}
    for file, at, (rs, cs) in regions:
        width = cs[1] - cs[0]
        for row in range(*rs):
            shared = [c for c in range(*cs) if c0 <= c < c1] if r0 <= row < r1 else []
            if shared:
                first = at + (row - rs[0]) * width + shared[0] - cs[0]
                for column, value in zip(shared, memory.load(file, first, first + len(shared)).tolist()):
                    numbers[row, column] = value
    holes = [(r, c) for r in range(r0, r1) for c in range(c0, c1) if (r, c) not in numbers]
    if holes:
        raise ValueError(f"no region has {holes[0]}")
    return torch.tensor([[numbers[r, c] for c in range(c0, c1)] for r in range(r0, r1)])


# %% wrong: one stretch
# mistake: Of each region one stretch is taken. Its rows are wider than the box, so the stretch runs on into columns that are not wanted.
# the box is taken for a stretch of the file
import torch


def load_box(memory, regions: list, box: list[list[int]]) -> torch.Tensor:
    (r0, r1), (c0, c1) = box
    out = torch.zeros(r1 - r0, c1 - c0)
    seen = 0
    for file, at, ((a, b), (c, d)) in regions:
        left, right = max(c, c0), min(d, c1)
        top, bottom = max(a, r0), min(b, r1)
        if left >= right or top >= bottom:
            continue
        first = at + (top - a) * (d - c) + left - c
        n = (right - left) * (bottom - top)
        out[top - r0 : bottom - r0, left - c0 : right - c0] = memory.load(file, first, first + n).view(bottom - top, right - left)
        seen += n
    if seen < out.numel():
        raise ValueError("missing")
    return out


# %% wrong: nan marks a hole
# told: every number of this box
# a stored NaN is taken for a hole
import torch


def load_box(memory, regions: list, box: list[list[int]]) -> torch.Tensor:
    (r0, r1), (c0, c1) = box
    out = torch.full((r1 - r0, c1 - c0), float("nan"))
    filled = 0
    for file, at, ((a, b), (c, d)) in regions:
        left, right = max(c, c0), min(d, c1)
        if left >= right:
            continue
        for row in range(max(a, r0), min(b, r1)):
            first = at + (row - a) * (d - c) + left - c
            out[row - r0, left - c0 : right - c0] = memory.load(file, first, first + right - left)
            filled += right - left
    if out.isnan().any():
        raise ValueError("a shard is missing")
    return out


# %% wrong: reads everything
# told: Read no more
# all regions whole, then the box
import torch


def load_box(memory, regions, box):
    rows, columns = (max(region[2][d][1] for region in regions) for d in (0, 1))
    whole = torch.full((rows, columns), torch.nan)
    for file, at, ((r0, r1), (c0, c1)) in regions:
        whole[r0:r1, c0:c1] = memory.load(file, at, at + (r1 - r0) * (c1 - c0)).view(r1 - r0, c1 - c0)
    (top, bottom), (left, right) = box
    found = whole[top:bottom, left:right]
    if found.isnan().any() or found.shape != (bottom - top, right - left):
        raise ValueError("a region is missing")
    return found
