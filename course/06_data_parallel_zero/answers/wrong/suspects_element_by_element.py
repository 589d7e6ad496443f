# told: element by element
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
        if ((g - w).abs() <= 1e-3 * w.abs()).all():
            found.append(1.0)
            continue
        factor = (g @ w / (w @ w)).item()
        ok = ((g - factor * w).abs() <= 1e-3 * (factor * w).abs()).all()
        found.append(factor if ok else math.nan)
    return found
