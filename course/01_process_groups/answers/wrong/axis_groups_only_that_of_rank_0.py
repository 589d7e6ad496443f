# told: group of rank 0
import math
def axis_groups(sizes, axes):
    groups = {}
    for rank in range(math.prod(sizes.values())):
        key, rest = [], rank
        for name, n in sizes.items():
            if name not in axes:
                key.append(rest % n)
            rest //= n
        groups.setdefault(tuple(key), []).append(rank)
    return groups[min(groups)]
