# one torch tensor, a row for each group
import math
from torch import arange
def axis_groups(sizes, axes):
    grid = arange(math.prod(sizes.values())).view(*list(sizes.values())[::-1])
    dims = {name: len(sizes) - 1 - i for i, name in enumerate(sizes)}
    last = sorted(dims[a] for a in axes)
    return grid.movedim(last, list(range(-len(last), 0))).reshape(-1, math.prod(sizes[a] for a in axes))
