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
