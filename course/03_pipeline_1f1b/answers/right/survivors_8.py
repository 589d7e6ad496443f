# the first subset whose rest is small beside the sum
import itertools
def survivors(got, grads):
    n = len(grads)
    return next([*s] for k in range(1, n + 1) for s in itertools.combinations(range(n), k)
                if (sum(grads[i] for i in s) - got).abs().max() <= 1e-4 * max(g.abs().max() for g in grads))
