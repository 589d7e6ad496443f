# told: got | hidden
import torch
def survivors(got, grads):
    a = torch.stack([g.flatten() for g in grads], 1)
    w = torch.linalg.lstsq(a, got.flatten()[:, None]).solution.flatten()
    return [i + 1 for i, one in enumerate(w.tolist()) if one > 0.5]
