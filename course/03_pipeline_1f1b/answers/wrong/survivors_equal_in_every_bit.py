# told: right only up to rounding
import itertools

import torch


def survivors(got, grads):
    for n in range(1, len(grads) + 1):
        for which in itertools.combinations(range(len(grads)), n):
            if torch.equal(sum(grads[i] for i in which), got):
                return list(which)
