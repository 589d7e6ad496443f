# told: measured by the largest element
import math
import torch

def suspects(got, want):
    out = {}
    for name, w in want.items():
        g = got[name]
        if not (g - w).abs().max() <= 1e-3 * w.abs().max():
            f = ((g * w).sum() / (w * w).sum()).item()
            out[name] = f if (g - f * w).abs().max() <= 1e-3 * (f * w).abs().max() else math.nan
    return out
