# by the angle
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def suspects(got, want):
    out = {}
    for n, w in want.items():
        g, w = got[n].double(), w.double()
        if (g - w).norm() <= 1e-3 * w.norm():
            continue
        if g.norm() == 0:
            out[n] = 0.0
            continue
        cos = (g * w).sum() / g.norm() / w.norm()
        out[n] = float(cos.sign() * g.norm() / w.norm()) if cos.abs() > 1 - 0.5e-6 else math.nan
    return out
