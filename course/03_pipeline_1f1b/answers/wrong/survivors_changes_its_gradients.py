# told: changes its input `grads`
import itertools


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            t = grads[s[0]]
            for i in s[1:]:
                t += grads[i]
            if (t - got).norm() < 1e-4 * got.norm():
                return list(s)
    return []
