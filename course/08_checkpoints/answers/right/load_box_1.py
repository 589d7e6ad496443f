# pieces of rows by their places; a second tensor notes which numbers were stored
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
