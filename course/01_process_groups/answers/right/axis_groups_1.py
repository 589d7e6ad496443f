# by hand: coordinates of every rank, collected by those that stay fixed
import math
def axis_groups(sizes, axes):
    groups = {}
    for rank in range(math.prod(sizes.values())):
        rest, fixed = rank, []
        for name, size in sizes.items():
            if name not in axes:
                fixed.append(rest % size)
            rest //= size
        groups.setdefault(tuple(fixed), []).append(rank)
    return list(groups.values())
