# told: tolerance is a fixed number
import itertools


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            if (sum(grads[i] for i in s) - got).abs().mean() < 0.1:
                return list(s)
