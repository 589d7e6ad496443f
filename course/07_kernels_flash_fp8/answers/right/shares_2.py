# least squares for all ranks at once
import torch
import torch.distributed as dist
def shares(outs, parts):
    A = torch.stack([p.flatten() for p in parts], 1)
    B = torch.stack([o.flatten() for o in outs], 1)
    return torch.linalg.lstsq(A, B).solution.T.tolist()
