# told: ordered by their first rank
import math, torch
def axis_groups(sizes, axes):
    names = list(reversed(sizes))
    grid = torch.arange(math.prod(sizes.values())).view([sizes[n] for n in names])
    fixed = [i for i, n in enumerate(names) if n not in axes][::-1]
    free = [i for i, n in enumerate(names) if n in axes]
    return grid.permute(*fixed, *free).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()
