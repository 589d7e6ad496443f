# told: with the *mean* of the chosen gradients
from itertools import combinations


def survivors(got, grads):
    n = len(grads)
    choices = [c for k in range(1, n + 1) for c in combinations(range(n), k)]
    return list(min(choices, key=lambda c: (got - sum(grads[i] for i in c) / len(c)).norm().item()))
