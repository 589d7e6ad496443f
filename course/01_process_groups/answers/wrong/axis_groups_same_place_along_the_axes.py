# told: same place along
def axis_groups(sizes, axes):
    import math
    groups = {}
    for rank in range(math.prod(sizes.values())):
        key, rest = [], rank
        for name, n in sizes.items():
            if name in axes:
                key.append(rest % n)
            rest //= n
        groups.setdefault(tuple(key), []).append(rank)
    return list(groups.values())
