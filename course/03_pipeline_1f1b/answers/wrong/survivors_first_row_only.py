# told: one unknown for each | one entry
import itertools

import torch


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            total = sum(grads[i] for i in s)
            if torch.allclose(total[0], got[0], rtol=1e-4, atol=float(1e-4 * got.abs().max())):
                return list(s)
