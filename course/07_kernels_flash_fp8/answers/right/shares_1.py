# the normal equations
import torch
import torch.distributed as dist
def shares(outs, parts):
    P = torch.stack([p.flatten() for p in parts]).double()
    return [torch.linalg.solve(P @ P.T, P @ o.flatten().double()).tolist() for o in outs]
