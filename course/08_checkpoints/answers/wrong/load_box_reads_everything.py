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
