from labkit.answers import Edit

_LOAD = "memory.load(file, start, start + last - first)"
_REFUSE = '    if filled < found.numel():\n        raise ValueError(f"{found.numel() - filled} numbers of {box} are in no region")\n'
_ROWS = "        for row in range(max(top, r0), min(bottom, r1)):\n"
_ROW = f"""            start = at + (row - r0) * (c1 - c0) + first - c0
            found[row - top, first - left : last - left] = {_LOAD}
            filled += last - first
"""
_ZEROS = "Where nothing was stored it returns zeros, or what was in memory. A run that begins with them trains on without an error."
_WIDE = "A region's rows lie one behind the other in its file: the next row begins as many numbers later as the *region* is wide, not the box, the part that they share, or the matrix."


def _at_once(condition, rest=""):
    """All rows of a region in one read."""
    return f"""        high, low = max(top, r0), min(bottom, r1)
        if {condition}:
            start, many = at + (high - r0) * (c1 - c0) + first - c0, (low - high) * (last - first)
            part = memory.load(file, start, start + many)
            found[high - top : low - top, first - left : last - left] = part.view(low - high, last - first)
            filled += many
{rest}"""


WRONG = [
    Edit(
        _ROWS + _ROW, _at_once("high < low"),
        mistake="Of each region one stretch is taken. Its rows are wider than the box, so the stretch runs on into columns that are not wanted.",
    ),
    Edit("start = at + (row", "start = (row", mistake="A region begins in its file where `at` says; before it lie numbers of others."),
    Edit("(row - r0) * (c1 - c0)", "(row - r0) * (right - left)"),  # in the visible case the box is as wide as a region
    Edit("(row - r0) * (c1 - c0)", "(row - r0) * (last - first)", mistake=_WIDE),
    Edit("(row - r0) * (c1 - c0)", "(row - r0) * max(columns[1] for _, _, (_, columns) in regions)", mistake=_WIDE),
    Edit("+ first - c0\n", "\n", mistake="Each row is read from its first column, where the box may begin further to the right."),
    Edit("torch.empty(", "torch.zeros(", (_REFUSE, ""), mistake=_ZEROS),
    Edit("raise ValueError(", "print(", mistake=_ZEROS),
    # whole regions, whole rows, one number at a time
    Edit(_LOAD, "memory.load(file, at, at + (r1 - r0) * (c1 - c0))[start - at : start - at + last - first]", told="more than once | Read no more"),
    Edit(_LOAD, "memory.load(file, start - first + c0, start - first + c1)[first - c0 : last - c0]", told="Read no more"),
    Edit(_LOAD, "torch.cat([memory.load(file, n, n + 1) for n in range(start, start + last - first)])", told="side by side"),
    Edit(_LOAD, f"({_LOAD}, {_LOAD})[1]", told="more than once"),
    Edit("if first >= last:", "if False:", told="an empty read"),
    # a stored NaN is taken for a hole
    Edit("torch.empty(bottom - top, right - left)", 'torch.full((bottom - top, right - left), float("nan"))', ("filled < found.numel()", "found.isnan().any()"), told="every number of this box"),
    Edit("filled < found.numel()", "filled == 0"),
    Edit("range(max(top, r0), min(bottom, r1))", "range(top, bottom)"),
    Edit("found[row - top,", "found[row - r0,"),
    Edit("for file, at, ((r0, r1), (c0, c1)) in regions:", "for file, at, ((r0, r1), (c0, c1)) in regions[:1]:"),
    # regions stand in any order: after one outside of the box there may be one that meets it
    Edit("        for row in range(max(top", "        if r0 >= bottom:\n            break\n        for row in range(max(top",
         told="every number of this box"),
    Edit("            continue\n", "            if c0 >= right:\n                break\n            continue\n",
         told="every number of this box"),
    # regions that contain the box alone
    Edit("if first >= last:", "if c0 > left or c1 < right:"),
]

RIGHT = [
    Edit(f"found[row - top, first - left : last - left] = {_LOAD}", f"found[row - top].narrow(0, first - left, last - first).copy_({_LOAD})"),
    # rows of one region, full width, in one read
    Edit(_ROWS, _at_once("high < low and (first, last) == (c0, c1)", "            continue\n        for row in range(high, low):\n")),
]


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
