from labkit.answers import Edit

WRONG = [
    Edit(
        "(right * right).sum()",
        "(mine * mine).sum()",
        ("mine - factor * right", "right - factor * mine"),
        mistake="The factor is got over want.",
    ),
    Edit(
        "            continue",
        """            found[name] = 1.0
            continue""",
        mistake="Leave out the gradients that are right.",
    ),
    Edit("1e-3 * right.norm()", "1e-3", mistake="A difference of 1e-3 is much for a small gradient and little for a large one: right is 1e-3 " "|want|."),
    Edit("(mine * right).sum() / (right * right).sum()", "(mine / right).mean()"),
    Edit("(mine * right).sum() / (right * right).sum()", "mine.flatten()[0] / right.flatten()[0]"),
    Edit("(mine * right).sum() / (right * right).sum()", "mine.sum() / right.sum()"),
    Edit("(mine * right).sum() / (right * right).sum()", "mine.abs().max() / right.abs().max()"),
    Edit("proportional = (mine - factor * right).norm() <= 1e-3 * (factor * right).norm()", "proportional = True"),
    Edit("(mine - right).norm() <= 1e-3 * right.norm()", "torch.equal(mine, right)"),
    Edit("(mine - right).norm() <= 1e-3 * right.norm()", "torch.allclose(mine, right, rtol=1e-3)"),
    Edit("(mine - right).norm() <= 1e-3 * right.norm()", "(mine - right).norm() <= 1e-2 * right.norm()"),
    Edit("(mine - right).norm() <= 1e-3 * right.norm()", "(mine - right).norm() <= 1e-4 * right.norm()"),
    Edit(
        "(mine - right).norm() <= 1e-3 * right.norm()",
        "right.norm() == 0 or (mine - right).norm() <= 1e-3 * right.norm()",
    ),
    Edit("1e-3 * (factor * right).norm()", "1e-3 * right.norm()", told="`"),
    Edit("else math.nan", "else 0.0"),
    Edit("else math.nan", "else None"),
]

RIGHT = [
    Edit(
        "(mine * right).sum() / (right * right).sum()",
        "torch.dot(mine.flatten(), right.flatten()) / right.norm() ** 2",
    ),
]


# %% right: least squares
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def suspects(got, want):
    out = {}
    for n in got:
        g, w = got[n].double().flatten(), want[n].double().flatten()
        if torch.dist(g, w) <= 1e-3 * w.norm():
            continue
        if not (g - w).isfinite().all():
            out[n] = float('nan')
            continue
        f = torch.linalg.lstsq(w[:, None], g[:, None]).solution.item()
        out[n] = f if torch.dist(g, f * w) <= 1e-3 * g.norm() else float('nan')
    return out


# %% right: by the angle
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
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


# %% right: the factor at the largest element
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


# %% wrong: any direction
# mistake: A gradient of another direction gets a factor, too: nothing looks at what the factor leaves.
import math
import torch

def suspects(got, want):
    out = {}
    for name, w in want.items():
        g = got[name]
        if not (g - w).norm() <= 1e-3 * w.norm():
            out[name] = ((g * w).sum() / (w * w).sum()).item()
    return out


# %% wrong: beside want
# mistake: What a factor leaves is measured beside |want|. It is small or large beside |factor · want|.
import math
import torch

def suspects(got, want):
    out = {}
    for name, w in want.items():
        g = got[name]
        if not (g - w).norm() <= 1e-3 * w.norm():
            f = ((g * w).sum() / (w * w).sum()).item()
            out[name] = f if (g - f * w).norm() <= 1e-3 * w.norm() else math.nan
    return out


# %% wrong: largest element
# mistake: Differences are measured by the largest element. |x| is the root of the sum of all squares.
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


# %% wrong: nan is right
# mistake: Every comparison with NaN is false: a gradient that holds NaN passes for right here.
import math
import torch

def suspects(got, want):
    out = {}
    for name, w in want.items():
        g = got[name]
        if (g - w).norm() > 1e-3 * w.norm():
            f = ((g * w).sum() / (w * w).sum()).item()
            out[name] = f if (g - f * w).norm() <= 1e-3 * (f * w).norm() else math.nan
    return out


# %% wrong: positive factors only
# mistake: A gradient may be wrong by its sign, or be 0 where it must not: -1 and 0 are factors, too.
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


# %% wrong: ratio of norms
# mistake: A norm does not see a direction, or a sign: gradients of the same length may still differ.
def suspects(got, want):
    return {n: (got[n].norm() / w.norm()).item() for n, w in want.items() if abs(got[n].norm() / w.norm() - 1) > 1e-3}
