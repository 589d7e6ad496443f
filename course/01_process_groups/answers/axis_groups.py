from labkit.answers import Edit

_ORDER = "The groups are right and their order is not. Groups are ordered by their first rank."
_RETURN = "grid.permute(*fixed, *free).reshape(-1, members).tolist()"

WRONG = [
    Edit(".tolist()", ".tolist()[0]", mistake="This is the group of rank 0. Asked are all groups."),
    Edit("list(reversed(sizes))", "list(sizes)",
         mistake="The first axis in `sizes` varies fastest; `view` and `reshape` want the slowest first."),
    Edit("grid.permute(*fixed, *free)", "grid",
         mistake="You cut the ranks into blocks of neighbours. Neighbours are a group along the fastest axis only."),
    Edit("(*fixed, *free).reshape(-1, members)", "(*free, *fixed).reshape(members, -1)",
         mistake="Your groups hold the ranks with the same place along `axes`. Along `axes` the ranks of a group "
                 "differ."),
    Edit("[i for i, a in enumerate(slowest_first) if a in axes]", "[slowest_first.index(a) for a in axes]",
         mistake="You list the ranks of a group in the order of `axes`. The order in `axes` says nothing: the ranks of "
                 "a group ascend."),
    Edit("return " + _RETURN,
         "parts = [grid.movedim(slowest_first.index(a), -1).reshape(-1, sizes[a]) for a in axes]\n    return [group "
         "for part in parts for group in part.tolist()]",
         mistake="You list the groups of each axis by itself. With several axes a group holds the ranks that differ in "
                 "any of them."),
    Edit("    slowest_first", "    axes = axes[:1]\n    slowest_first",
         mistake="These are the groups along one of the axes only. With several axes a group holds the ranks that "
                 "differ in any of them."),
    Edit("*fixed,", "*fixed[::-1],", mistake=_ORDER),
    Edit(".tolist()", ".tolist()[::-1]", mistake=_ORDER),
    Edit(_RETURN, f"[group for group in {_RETURN} if len(group) > 1]",
         mistake="Groups of one rank are missing. Along an axis of size 1 every rank is such a group."),
    # `sizes` may name the axes in another order
    Edit("list(reversed(sizes))", '[a for a in ("pp", "dp", "edp", "ep", "cp", "tp", "etp") if a in sizes]',
         told="hidden"),
    Edit("    return", "    sizes.clear()\n    return", told="it changes its input `sizes`"),
    Edit("import math", "from minimegatron.comm.mesh import rank_groups\nimport math",
         told="`minimegatron.comm.mesh` is closed in this exercise"),
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
