# told: one stretch
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
