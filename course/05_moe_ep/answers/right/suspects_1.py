# least squares
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def suspects(got, want):
    out = {}
    for n in got:
        g, w = got[n].double().flatten(), want[n].double().flatten()
        if torch.dist(g, w) <= 1e-3 * w.norm():
            continue
        if not (g - w).isfinite().all():
            out[n] = float('nan')
            continue
        f = torch.linalg.lstsq(w[:, None], g[:, None]).solution.item()
        out[n] = f if torch.dist(g, f * w) <= 1e-3 * g.norm() else float('nan')
    return out
