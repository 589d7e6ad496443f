# told: of another direction gets a factor
import math
import torch

def suspects(got, want):
    out = {}
    for name, w in want.items():
        g = got[name]
        if not (g - w).norm() <= 1e-3 * w.norm():
            out[name] = ((g * w).sum() / (w * w).sum()).item()
    return out
