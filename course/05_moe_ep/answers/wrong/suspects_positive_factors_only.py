# told: -1 and 0 are factors
import math


def suspects(got, want):
    found = {}
    for name, right in want.items():
        mine = got[name]
        if (mine - right).norm() <= 1e-3 * right.norm():
            continue
        factor = ((mine * right).sum() / (right * right).sum()).item()
        fits = factor > 0 and (mine - factor * right).norm() <= 1e-3 * mine.norm()
        found[name] = factor if fits else math.nan
    return found
