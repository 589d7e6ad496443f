# told: changes
import torch
def survivors(got, grads):
    a = torch.stack([g.flatten() for g in grads], 1)
    w = torch.linalg.lstsq(a, got.flatten()[:, None]).solution.flatten()
    found = [i for i, one in enumerate(w.tolist()) if one > 0.5]
    for i in found:
        got -= grads[i]
    return found
