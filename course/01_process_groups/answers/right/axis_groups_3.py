# one NumPy transpose, with the axes' dims sorted to the end
import math, numpy
def axis_groups(sizes, axes):
    names = list(sizes)[::-1]
    grid = numpy.arange(math.prod(sizes.values())).reshape([sizes[n] for n in names])
    order = sorted(range(len(names)), key=lambda i: names[i] in axes)
    return grid.transpose(order).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()
