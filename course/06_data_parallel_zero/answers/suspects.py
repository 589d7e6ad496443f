from labkit.answers import Edit

_RIGHT = "(mine - right).norm() <= 1e-3 * right.norm()"
_FACTOR = "(mine * right).sum() / (right * right).sum()"
_PROPORTIONAL = "(mine - factor * right).norm() <= 1e-3 * (factor * right).norm()"

WRONG = [
    Edit(
        _RIGHT, "((mine - right).abs() <= 1e-3 * right.abs()).all()",
        (_PROPORTIONAL, "((mine - factor * right).abs() <= 1e-3 * (factor * right).abs()).all()"),
        mistake="You compare element by element. A part is right if the norm of its *whole* error is small: rounding leaves a little where 0 is right.",
    ),
    Edit(_FACTOR, "mine.norm() / right.norm()", (_PROPORTIONAL, "True"), mistake="A norm does not see a direction, or a sign: stretches of the same length may still differ."),
    Edit("(right * right).sum()", "(mine * mine).sum()", ("mine - factor * right", "right - factor * mine"), mistake="The factor is got over want."),
    Edit("factor.item() if proportional", "factor.item() if proportional and factor > 0", mistake="A factor may be 0, or negative."),
    Edit(
        "want.new_zeros(sum(sizes) - len(want))", "got[-1][len(got[-1]) - (sum(sizes) - len(want)) :]",
        mistake="Padding belongs to the last part. Where it is not 0, the part is wrong.",
    ),
    Edit(_FACTOR, "mine.norm() / right.norm()"),
    Edit("torch.cat([want, want.new_zeros(sum(sizes) - len(want))])", "want", ("padded.split(sizes)", "padded.chunk(len(got))")),
    Edit("else math.nan", "else 0.0"),
    Edit(_PROPORTIONAL, "True"),
    Edit("1e-3 * (factor * right).norm()", "1e-3 * right.norm()"),
]

RIGHT = [
    Edit(_FACTOR, "torch.dot(mine, right) / right.norm() ** 2"),
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
