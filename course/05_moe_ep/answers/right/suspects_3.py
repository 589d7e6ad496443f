# NumPy, the cosine
import numpy as np


def suspects(got, want):
    wrong = {}
    for name in sorted(want):
        g, w = (t[name].double().numpy().ravel() for t in (got, want))
        if np.linalg.norm(g - w) <= 1e-3 * np.linalg.norm(w):
            continue
        with np.errstate(all="ignore"):
            f = np.float64(g @ w) / np.float64(w @ w)
        wrong[name] = f if np.linalg.norm(g - f * w) <= 1e-3 * np.linalg.norm(g) else np.nan
    return wrong
