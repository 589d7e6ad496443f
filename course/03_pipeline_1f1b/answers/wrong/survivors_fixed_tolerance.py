# told: tolerance is a fixed number
import itertools

import torch


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            if torch.allclose(sum(grads[i] for i in s), got, atol=1e-2):
                return list(s)
