import math
import torch

def suspects(got, want):
    """The factor at the largest element of want."""
    wrong = {}
    for name, w in want.items():
        g = got[name]
        if (g - w).norm() <= 1e-3 * w.norm():
            continue
        at = w.abs().flatten().argmax()
        if w.flatten()[at] == 0:
            wrong[name] = float("nan")
            continue
        f = (g.flatten()[at] / w.flatten()[at]).item()
        wrong[name] = f if (g - f * w).norm() <= 1e-3 * (f * w).norm() else float("nan")
    return wrong
