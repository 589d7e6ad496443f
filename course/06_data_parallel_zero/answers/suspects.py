from labkit.answers import Edit

WRONG = [
    Edit(
        "(right * right).sum()",
        "(mine * mine).sum()",
        ("mine - factor * right", "right - factor * mine"),
        mistake="The factor is got over want.",
    ),
    Edit("(mine * right).sum() / (right * right).sum()", "mine.norm() / right.norm()"),
    Edit(
        "padded = torch.cat([want, want.new_zeros(sum(sizes) - len(want))])",
        "padded = want",
        ("padded.split(sizes)", "padded.chunk(len(got))"),
    ),
    Edit("else math.nan", "else 0.0"),
    Edit("proportional = (mine - factor * right).norm() <= 1e-3 * (factor * right).norm()", "proportional = True"),
    Edit("factor.item() if proportional", "factor.item() if proportional and factor > 0", mistake="A factor may be 0, or negative."),
    Edit("1e-3 * (factor * right).norm()", "1e-3 * right.norm()"),
]

RIGHT = [
    Edit("(mine * right).sum() / (right * right).sum()", "torch.dot(mine, right) / right.norm() ** 2"),
    Edit("padded.split(sizes)", "padded.tensor_split([sum(sizes[:i]) for i in range(1, len(sizes))])"),
    Edit(
        "torch.cat([want, want.new_zeros(sum(sizes) - len(want))])",
        "torch.nn.functional.pad(want, (0, sum(sizes) - len(want)))",
    ),
]


# %% right: the factor at the largest element
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


# %% right: the factor by a projection, ranks one by one
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
        factor = (g @ w / (w @ w)).item()
        ok = (g - factor * w).norm() <= 1e-3 * (factor * w).norm()
        found.append(factor if ok else math.nan)
    return found


# %% wrong: element by element
# mistake: You compare element by element. A part is right if the norm of its *whole* error is small: rounding leaves a little where 0 is right.
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


# %% wrong: padding ignored
# mistake: Padding belongs to the last part. Where it is not 0, the part is wrong.
import math

import torch


def suspects(got: list[torch.Tensor], want: torch.Tensor) -> list[float]:
    """Of each rank: 1.0, its factor, or nan."""
    total = sum(len(part) for part in got)
    want = torch.cat([want, got[-1][len(got[-1]) - (total - len(want)):]]).double()
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
