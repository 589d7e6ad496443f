# told: one entry of the tensors
import itertools


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            total = sum(grads[i] for i in s)
            if abs(total.flatten()[0] - got.flatten()[0]) <= 1e-4 * got.abs().max():
                return list(s)
