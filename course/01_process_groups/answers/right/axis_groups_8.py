def axis_groups(sizes, axes):
    world = 1
    for n in sizes.values():
        world *= n
    groups = {}
    for rank in range(world):
        key, rest = [], rank
        for name, n in sizes.items():
            if name not in axes:
                key.append(rest % n)
            rest //= n
        groups.setdefault(tuple(key), []).append(rank)
    return list(groups.values())
