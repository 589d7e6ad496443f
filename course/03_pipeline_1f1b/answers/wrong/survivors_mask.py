# told: asked are the indices
import torch


def survivors(got, grads):
    columns = torch.stack([g.flatten() for g in grads], dim=1).double()
    weights = torch.linalg.lstsq(columns, got.flatten().double()[:, None]).solution[:, 0]
    return [bool(w > 0.5) for w in weights]
