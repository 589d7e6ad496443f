import math

import torch


def suspects(got: list[torch.Tensor], want: torch.Tensor) -> list[float]:
    """Of each rank: 1.0, its factor, or nan."""
    total = sum(len(part) for part in got)
    want = torch.cat([want, want.new_zeros(total - len(want))]).double()
    found, at = [], 0
    for part in got:
        w, g = want[at : at + len(part)], part.double()
        at += len(part)
        if (g - w).norm() <= 1e-3 * w.norm():
            found.append(1.0)
            continue
        k = int(w.abs().argmax())
        factor = (g[k] / w[k]).item() if w[k] != 0 else math.nan
        ok = (g - factor * w).norm() <= 1e-3 * (factor * w).norm()
        found.append(factor if ok else math.nan)
    return found
