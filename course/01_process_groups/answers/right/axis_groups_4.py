# a generator of ranges and tuples, by the strides of the axes
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
