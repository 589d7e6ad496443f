# no tensor: ranks with the same fixed coordinates are collected in a dict
def axis_groups(sizes, axes):
    world = 1
    for size in sizes.values():
        world *= size
    groups = {}
    for rank in range(world):
        fixed, rest = [], rank
        for name, size in sizes.items():
            rest, place = divmod(rest, size)
            if name not in axes:
                fixed.append(place)
        groups.setdefault(tuple(fixed), []).append(rank)
    return list(groups.values())
