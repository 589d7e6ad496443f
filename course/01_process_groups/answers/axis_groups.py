from labkit.answers import Edit

WRONG = [
    Edit("list(reversed(sizes))", "list(sizes)", mistake="The first axis in `sizes` varies fastest; `view` and `reshape` want the slowest first."),
    Edit("grid.permute(*fixed, *free)", "grid", mistake="You cut the ranks into blocks of neighbours. Neighbours are a group along the fastest axis only."),
    Edit(".tolist()", ".tolist()[::-1]", told="grid ="),
    # sizes may name the axes in another order
    Edit(
        "list(reversed(sizes))",
        '["pp", "dp", "cp", "tp"] if "cp" in sizes else ["pp", "edp", "ep", "etp"] if "ep" in sizes else '
        '[a for a in ("pp", "dp", "tp") if a in sizes]',
    ),
]


# %% right: strides and itertools.product in place of a grid
import itertools, math
def axis_groups(sizes, axes):
    stride, at = {}, 1
    for n, s in sizes.items():
        stride[n], at = at, at * s
    def ranks(names):
        names = [n for n in reversed(sizes) if names(n)]
        return [sum(stride[n] * i for n, i in zip(names, ix)) for ix in itertools.product(*(range(sizes[n]) for n in names))]
    return [[base + m for m in ranks(lambda n: n in axes)] for base in ranks(lambda n: n not in axes)]


# %% right: one NumPy transpose, with the axes' dims sorted to the end
import math, numpy
def axis_groups(sizes, axes):
    names = list(sizes)[::-1]
    grid = numpy.arange(math.prod(sizes.values())).reshape([sizes[n] for n in names])
    order = sorted(range(len(names)), key=lambda i: names[i] in axes)
    return grid.transpose(order).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()


# %% right: a generator of ranges and tuples, by the strides of the axes
import itertools, math
def axis_groups(sizes, axes):
    strides = dict(zip(sizes, itertools.accumulate([1, *sizes.values()], lambda a, b: a * b)))
    if len(axes) == 1:
        [a] = axes
        step, n = strides[a], sizes[a]
        for r in range(math.prod(sizes.values())):
            if r // step % n == 0:
                yield range(r, r + step * n, step)
        return
    for r in range(math.prod(sizes.values())):
        if all(r // strides[a] % sizes[a] == 0 for a in axes):
            moves = [[strides[a] * i for i in range(sizes[a])] for a in axes]
            yield tuple(sorted(r + sum(m) for m in itertools.product(*moves)))


# %% right: digits of a rank by division, collected in a dict
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


# %% wrong: dims in the order of axes
# mistake: You list the ranks of a group in the order of `axes`. The order in `axes` says nothing: the ranks of a group ascend.
import math, torch
def axis_groups(sizes, axes):
    names = list(reversed(sizes))
    grid = torch.arange(math.prod(sizes.values())).view([sizes[n] for n in names])
    fixed = [i for i, n in enumerate(names) if n not in axes]
    return grid.permute(*fixed, *(names.index(a) for a in axes)).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()


# %% wrong: each axis by itself
# mistake: You list the groups of each axis by itself. With several axes a group holds the ranks that differ in any of them.
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


# %% wrong: first of axes only
# mistake: These are the groups along one of the axes only. With several axes a group holds the ranks that differ in any of them.
import math

import torch


def axis_groups(sizes, axes):
    names = list(sizes)[::-1]
    grid = torch.arange(math.prod(sizes.values())).reshape([sizes[n] for n in names])
    return grid.movedim(names.index(axes[0]), -1).reshape(-1, sizes[axes[0]]).tolist()


# %% wrong: groups are not ordered
# mistake: The groups are right and their order is not. Groups are ordered by their first rank.
import math, torch
def axis_groups(sizes, axes):
    names = list(reversed(sizes))
    grid = torch.arange(math.prod(sizes.values())).view([sizes[n] for n in names])
    fixed = [i for i, n in enumerate(names) if n not in axes][::-1]
    free = [i for i, n in enumerate(names) if n in axes]
    return grid.permute(*fixed, *free).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()


# %% wrong: of one rank are left out
# mistake: Groups of one rank are missing. Along an axis of size 1 every rank is such a group.
import math, torch
def axis_groups(sizes, axes):
    names = list(reversed(sizes))
    grid = torch.arange(math.prod(sizes.values())).view([sizes[n] for n in names])
    fixed = [i for i, n in enumerate(names) if n not in axes]
    free = [i for i, n in enumerate(names) if n in axes]
    groups = grid.permute(*fixed, *free).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()
    return [g for g in groups if len(g) > 1]


# %% wrong: only that of rank 0
# mistake: This is the group of rank 0. Asked are all groups.
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


# %% wrong: same place along the axes
# mistake: Your groups hold the ranks with the same place along `axes`. Along `axes` the ranks of a group differ.
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


# %% wrong: changes sizes
# told: changes
import math, torch
def axis_groups(sizes, axes):
    names, shape, members = list(reversed(sizes)), [], 1
    free = [i for i, n in enumerate(names) if n in axes]
    fixed = [i for i, n in enumerate(names) if n not in axes]
    while sizes:
        name, size = sizes.popitem()
        shape.append(size)
        members *= size if name in axes else 1
    return torch.arange(math.prod(shape)).view(shape).permute(*fixed, *free).reshape(-1, members).tolist()


# %% wrong: of the package
# told: `minimegatron.comm.mesh` is closed in this exercise
def axis_groups(sizes, axes):
    from minimegatron.comm.mesh import rank_groups

    return rank_groups(sizes, axes)


