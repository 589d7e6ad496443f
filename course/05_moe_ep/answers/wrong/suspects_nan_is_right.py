# told: Every comparison with NaN is false
import math
import torch

def suspects(got, want):
    out = {}
    for name, w in want.items():
        g = got[name]
        if (g - w).norm() > 1e-3 * w.norm():
            f = ((g * w).sum() / (w * w).sum()).item()
            out[name] = f if (g - f * w).norm() <= 1e-3 * (f * w).norm() else math.nan
    return out
