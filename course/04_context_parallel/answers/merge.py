from labkit.answers import Edit

WRONG = [
    Edit("more, total", "more, lse + more_lse", told="not their logarithms"),
    Edit("total.masked_fill(total == -torch.inf, 0.0)", "total", told="take 0 in its place"),
    Edit("torch.logaddexp(lse, more_lse)", "(lse.exp() + more_lse.exp()).log()", told="exp(lse) overflows"),
    Edit(
        "torch.logaddexp(lse, more_lse)",
        "(lse.exp() + more_lse.exp()).log()",
        ("total.masked_fill(total == -torch.inf, 0.0)", "total"),
        told="exp(lse) overflows",
    ),
    # lse in base two
    Edit("total = torch.logaddexp(lse, more_lse)", "total = torch.logaddexp2(lse, more_lse)"),
    # one weight for all rows
    Edit("exp(lse - finite)[..., None]", "exp(lse - finite).mean()"),
    # shares swapped
    Edit(
        "exp(lse - finite)[..., None] * out + torch.exp(more_lse - finite)",
        "exp(more_lse - finite)[..., None] * out + torch.exp(lse - finite)",
        told="shares are exchanged",
    ),
]


# %% right: the maximum is subtracted by hand
import torch
import torch.distributed as dist
import torch.nn.functional as F
def merge(out, lse, more, more_lse):
    top = torch.maximum(lse, more_lse).nan_to_num(neginf=0.0)
    a, b = (lse - top).exp(), (more_lse - top).exp()
    total = a + b
    safe = torch.where(total > 0, total, 1.0)
    return (out * (a / safe)[..., None] + more * (b / safe)[..., None]), top + total.log()


# %% right: a softmax of the two logarithms
import torch
import torch.distributed as dist
import torch.nn.functional as F
def merge(out, lse, more, more_lse):
    w = torch.stack((lse, more_lse)).softmax(0).nan_to_num(0.0)
    return w[0, ..., None] * out + w[1, ..., None] * more, torch.logsumexp(torch.stack((lse, more_lse)), 0)


# %% right: one sigmoid: the share of the second piece
import torch
import torch.distributed as dist
import torch.nn.functional as F
def merge(out, lse, more, more_lse):
    w = torch.sigmoid((more_lse - lse).nan_to_num(0.0, posinf=1e9, neginf=-1e9))[..., None]
    return out + w * (more - out), torch.logaddexp(lse, more_lse)


# %% right: a sigmoid of the difference
import torch


def merge(out, lse, more, more_lse):
    seen = torch.isfinite(lse) | torch.isfinite(more_lse)
    share = torch.where(seen, torch.sigmoid(torch.where(seen, lse - more_lse, 0.0)), 0.0)[..., None]
    return share * out + (seen[..., None].to(out.dtype) - share) * more, torch.logaddexp(lse, more_lse)


# %% right: softmax over a stack of two
import torch


def merge(out, lse, more, more_lse):
    both = torch.stack((lse, more_lse))
    weights = both.softmax(0).nan_to_num(0.0)
    return torch.einsum("pan,pand->and", weights, torch.stack((out, more))), both.logsumexp(0)


# %% right: the share by a sigmoid
import torch


def merge(out, lse, more, more_lse):
    share = torch.nan_to_num(torch.sigmoid(more_lse - lse), nan=0.0).unsqueeze(-1)
    return out + share * (more - out), torch.logaddexp(lse, more_lse)


# %% wrong: adds
# told: divided by its own sum
import torch
import torch.distributed as dist
import torch.nn.functional as F
def merge(out, lse, more, more_lse):
    return out + more, torch.logaddexp(lse, more_lse)


# %% wrong: averages
# told: This is the average
import torch
import torch.distributed as dist
import torch.nn.functional as F
def merge(out, lse, more, more_lse):
    return (out + more) / 2, torch.logaddexp(lse, more_lse)


# %% wrong: changes lse
import torch


def merge(out, lse, more, more_lse):
    before = lse.clone()
    torch.logaddexp(lse, more_lse, out=lse)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.exp(before - finite)[..., None] * out + torch.exp(more_lse - finite)[..., None] * more, lse


# %% wrong: changes out
import torch


def merge(out, lse, more, more_lse):
    total = torch.logaddexp(lse, more_lse)
    finite = total.masked_fill(total == -torch.inf, 0.0)
    out *= torch.exp(lse - finite)[..., None]
    out += torch.exp(more_lse - finite)[..., None] * more
    return out, total


# %% wrong: clamped at ten
import torch


def merge(out, lse, more, more_lse):
    lse, more_lse = lse.clamp(max=80.0), more_lse.clamp(max=80.0)
    total = torch.logaddexp(lse, more_lse)
    finite = total.masked_fill(total == -torch.inf, 0.0)
    return torch.exp(lse - finite)[..., None] * out + torch.exp(more_lse - finite)[..., None] * more, total


# %% wrong: empty first piece only
import torch


def merge(out, lse, more, more_lse):
    if torch.isinf(lse).all():
        return more, more_lse
    total = lse + torch.log1p(torch.exp(more_lse - lse))
    return torch.exp(lse - total)[..., None] * out + torch.exp(more_lse - total)[..., None] * more, total


# %% wrong: empty for all or none
# told: row by row
import torch


def merge(out, lse, more, more_lse):
    if torch.isinf(lse).any():
        return more, more_lse
    if torch.isinf(more_lse).any():
        return out, lse
    t = torch.logaddexp(lse, more_lse)
    return (lse - t).exp()[..., None] * out + (more_lse - t).exp()[..., None] * more, t


# %% wrong: exponential of lse
# told: exp(lse) overflows
import torch
import torch.distributed as dist
import torch.nn.functional as F
def merge(out, lse, more, more_lse):
    a, b = lse.exp()[..., None], more_lse.exp()[..., None]
    return (a * out + b * more) / (a + b), (a + b).log().squeeze(-1)


# %% wrong: keeps one of two empty rows as nan
import torch


def merge(out, lse, more, more_lse):
    top = torch.maximum(lse, more_lse)
    a, b = torch.exp(lse - top), torch.exp(more_lse - top)
    new = (a[..., None] * out + b[..., None] * more) / (a + b)[..., None]
    return new, top + torch.log(a + b)


# %% wrong: larger piece only
import torch


def merge(out, lse, more, more_lse):
    larger = (more_lse > lse)[..., None]
    return torch.where(larger, more, out), torch.logaddexp(lse, more_lse)


# %% wrong: larger piece whole
# told: larger piece counts whole
import torch


def merge(out, lse, more, more_lse):
    m = torch.maximum(lse, more_lse)
    ref = m.masked_fill(m == -torch.inf, 0)
    a, b = (lse - ref).exp(), (more_lse - ref).exp()
    return a[..., None] * out + b[..., None] * more, torch.logaddexp(lse, more_lse)


# %% wrong: lse of the larger
# told: lse is that of the larger piece
import torch


def merge(out, lse, more, more_lse):
    both = torch.stack((lse, more_lse))
    weights = both.softmax(0).nan_to_num(0.0)
    return torch.einsum("pan,pand->and", weights, torch.stack((out, more))), torch.maximum(lse, more_lse)


# %% wrong: shares of the logarithms
# told: ratios of the sums
import torch


def merge(out, lse, more, more_lse):
    w = torch.nan_to_num(lse / (lse + more_lse))
    return w[..., None] * out + (1 - w)[..., None] * more, torch.logaddexp(lse, more_lse)
