from labkit.answers import Edit

_RIGHT = "(mine - right).norm() <= 1e-3 * right.norm()"
_FACTOR = "(mine * right).sum() / (right * right).sum()"
_FITS = "(mine - factor * right).norm() <= 1e-3 * (factor * right).norm()"
_LENGTH = "A norm does not see a direction, or a sign: gradients of the same length may still differ."

WRONG = [
    Edit("            continue", "            found[name] = 1.0\n            continue",
         mistake="Leave out the gradients that are right."),
    Edit(_FACTOR, "(mine * right).sum() / (mine * mine).sum()",
         (_FITS, "(right - factor * mine).norm() <= 1e-3 * right.norm()"),
         mistake="The factor is got over want."),
    Edit(_FITS, "True",
         mistake="A gradient of another direction gets a factor, too: nothing looks at what the factor leaves."),
    Edit(_FITS, f"factor > 0 and {_FITS}",
         mistake="A gradient may be wrong by its sign, or be 0 where it must not: -1 and 0 are factors, too."),
    Edit(_FITS, _FITS.replace("<=", "<"), mistake="A gradient may be 0 where it must not: 0 is a factor, too."),
    Edit(_RIGHT, "abs(mine.norm() / right.norm() - 1) <= 1e-3", (_FACTOR, "mine.norm() / right.norm()"),
         (_FITS, "True"), mistake=_LENGTH),
    Edit(_FACTOR, "mine.norm() / right.norm()", mistake=_LENGTH),
    Edit(f"if {_RIGHT}", "if not (mine - right).norm() > 1e-3 * right.norm()",
         mistake="Every comparison with NaN is false: a gradient that holds NaN passes for right here."),
    Edit("1e-3 * right.norm()", "1e-3",
         mistake="A difference of 1e-3 is much for a small gradient and little for a large one: right is 1e-3 |want|."),
    Edit(_FITS, "(mine - factor * right).norm() <= 1e-3 * right.norm()",
         mistake="What a factor leaves is measured beside |want|. It is small or large beside |factor · want|."),
    Edit("<= 1e-3 * (factor * right).norm()", "<= 1e-3 * (factor * right).norm() + 1e-6",
         mistake="What a factor leaves is small or large beside |factor · want|. Here a part of the tolerance is "
         "absolute, so beside tiny gradients nothing is large."),
    Edit(".norm()", ".abs().max()",
         mistake="Differences are measured by the largest element. |x| is the root of the sum of all squares."),
    Edit(_FACTOR, "(mine / right).mean()"),
    Edit(_FACTOR, "mine.flatten()[0] / right.flatten()[0]"),
    Edit(_FACTOR, "mine.sum() / right.sum()"),
    Edit(_FACTOR, "mine.abs().max() / right.abs().max()"),
    Edit(_RIGHT, "torch.allclose(mine, right, rtol=1e-3)",
         mistake="Elements are compared one by one. Right is said of the whole, |got - want| <= 1e-3 |want|: an element "
         "that should be 0 may be a little off."),
    Edit(_RIGHT, "(mine - right).norm() <= 1e-2 * right.norm()"),
    Edit(_RIGHT, "(mine - right).norm() <= 1e-4 * right.norm()"),
    Edit(_RIGHT, f"right.norm() == 0 or {_RIGHT}"),
    Edit("else math.nan", "else 0.0"),
    Edit("1e-3 * right.norm()", "1e-3 * mine.norm()"),
    Edit("else math.nan", "else None"),
]

RIGHT = [Edit(_FACTOR, "torch.dot(mine.flatten(), right.flatten()) / right.norm() ** 2")]


# %% right: by the angle
import math

def suspects(got, want):
    out = {}
    for n, w in want.items():
        g, w = got[n].double(), w.double()
        if (g - w).norm() <= 1e-3 * w.norm():
            continue
        if g.norm() == 0:
            out[n] = 0.0
            continue
        cos = (g * w).sum() / g.norm() / w.norm()
        out[n] = float(cos.sign() * g.norm() / w.norm()) if cos.abs() > 1 - 0.5e-6 else math.nan
    return out


# %% right: NumPy, the cosine
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
