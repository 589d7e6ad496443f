# told: grid =
# several axes are taken for one axis from the fastest to the slowest of them: right while they are neighbours
import math
def axis_groups(sizes, axes):
    names = list(sizes)
    at = sorted(names.index(a) for a in axes)
    low, high = at[0], at[-1]
    step, n = math.prod(sizes[a] for a in names[:low]), math.prod(sizes[a] for a in names[low : high + 1])
    world = math.prod(sizes.values())
    return [list(range(r, r + step * n, step)) for r in range(world) if r // step % n == 0]
