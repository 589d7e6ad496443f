# told: microbatches that are *not* in the sum
import torch


def survivors(got, grads):
    """Look for what is missing from the whole sum."""
    columns = torch.stack([g.flatten() for g in grads], dim=1).double()
    missing = sum(grads).flatten().double() - got.flatten().double()
    weights = torch.linalg.lstsq(columns, missing[:, None]).solution[:, 0]
    return [i for i, w in enumerate(weights) if w > 0.5]
