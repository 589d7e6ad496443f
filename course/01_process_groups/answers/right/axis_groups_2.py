# strides and itertools.product in place of a grid
import itertools, math
def axis_groups(sizes, axes):
    stride, at = {}, 1
    for n, s in sizes.items():
        stride[n], at = at, at * s
    def ranks(names):
        names = [n for n in reversed(sizes) if names(n)]
        return [sum(stride[n] * i for n, i in zip(names, ix)) for ix in itertools.product(*(range(sizes[n]) for n in names))]
    return [[base + m for m in ranks(lambda n: n in axes)] for base in ranks(lambda n: n not in axes)]
