# told: right up to rounding
import torch


def survivors(got, grads):
    a = torch.stack([g.flatten() for g in grads], 1)
    w = torch.linalg.lstsq(a, got.flatten()[:, None]).solution.flatten()
    return [i for i in range(len(grads)) if w[i] == 1]
