# told: each axis by itself
import math
def axis_groups(sizes, axes):
    out = []
    for axis in axes:
        groups = {}
        for rank in range(math.prod(sizes.values())):
            key, rest = [], rank
            for name, n in sizes.items():
                if name != axis:
                    key.append(rest % n)
                rest //= n
            groups.setdefault(tuple(key), []).append(rank)
        out += list(groups.values())
    return out
