# told: element by element
import math, torch
def suspects(got, want):
    whole = torch.cat(list(got)); pad = len(whole) - len(want); want = torch.nn.functional.pad(want, (0, pad))
    out, at = [], 0
    for g in got:
        w = want[at:at + len(g)]; at += len(g)
        ks = [1.0] + [float(g[k] / w[k]) for k in [int(w.abs().argmax())] if len(g) and w[k]]
        fit = [f for f in ks if torch.isclose(g, torch.as_tensor(f, dtype=w.dtype) * w, rtol=1e-3, atol=0).all()]
        out.append(fit[0] if fit else math.nan)
    return out
