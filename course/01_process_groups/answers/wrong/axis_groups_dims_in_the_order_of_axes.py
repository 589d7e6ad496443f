# told: order in `axes` says nothing
import math, torch
def axis_groups(sizes, axes):
    names = list(reversed(sizes))
    grid = torch.arange(math.prod(sizes.values())).view([sizes[n] for n in names])
    fixed = [i for i, n in enumerate(names) if n not in axes]
    return grid.permute(*fixed, *(names.index(a) for a in axes)).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()
