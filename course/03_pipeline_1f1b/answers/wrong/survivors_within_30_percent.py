# told: too wide
import itertools


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            if (sum(grads[i] for i in s) - got).norm() < 0.3 * got.norm():
                return list(s)
    return []
