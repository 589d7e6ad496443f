# the normal equations
import torch
def survivors(got, grads):
    g = torch.stack([x.flatten() for x in grads]).double()
    w = torch.linalg.solve(g @ g.T, g @ got.flatten().double())
    return torch.nonzero(w > 0.5).flatten().tolist()
