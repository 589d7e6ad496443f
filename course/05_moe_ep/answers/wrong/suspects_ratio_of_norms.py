# told: does not see a direction
def suspects(got, want):
    return {n: (got[n].norm() / w.norm()).item() for n, w in want.items() if abs(got[n].norm() / w.norm() - 1) > 1e-3}
