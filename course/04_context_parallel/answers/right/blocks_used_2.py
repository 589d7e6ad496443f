# the formula, and the nearest by the largest difference
import torch
import torch.distributed as dist
import torch.nn.functional as F
def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    C, used = len(ks), []
    for i, got in enumerate(dqs):
        see = at[rank][:, None] >= at[(rank - i) % C]
        def dq(j):
            p = torch.exp(q @ ks[j].mT / q.shape[-1] ** 0.5 - lse[..., None]).masked_fill(~see, 0)
            return p * (dout @ vs[j].mT - (dout * out).sum(-1, keepdim=True)) @ ks[j] / q.shape[-1] ** 0.5
        used += [min(range(C), key=lambda j: float((dq(j) - got).abs().max()))]
    return used
