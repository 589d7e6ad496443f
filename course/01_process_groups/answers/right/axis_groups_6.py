# a NumPy array, by sorting the ranks by the coordinates that stay fixed
import math, numpy
def axis_groups(sizes, axes):
    ranks = numpy.arange(math.prod(sizes.values()))
    coordinates = dict(zip(sizes, numpy.unravel_index(ranks, tuple(sizes.values()), order="F")))
    key = numpy.zeros_like(ranks)
    for name in reversed(sizes):
        if name not in axes:
            key = key * sizes[name] + coordinates[name]
    return ranks[numpy.argsort(key, kind="stable")].reshape(-1, math.prod(sizes[a] for a in axes))
