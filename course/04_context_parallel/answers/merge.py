from labkit.answers import Edit

WRONG = [
    Edit("more, total", "more, lse + more_lse", mistake="The sums add, not their logarithms: lse_new = log(exp(lse) + exp(more_lse))."),
    Edit("total.masked_fill(total == -torch.inf, 0.0)", "total", mistake="Where neither has seen anything, -inf minus -inf is no number: take 0 in its place, so that out " "stays 0."),
    Edit("torch.logaddexp(lse, more_lse)", "(lse.exp() + more_lse.exp()).log()", mistake="exp(lse) overflows for a large lse, and is 0 for a very negative one. Take exp of differences " "only: exp(lse - lse_new)."),
    Edit(
        "torch.logaddexp(lse, more_lse)",
        "(lse.exp() + more_lse.exp()).log()",
        ("total.masked_fill(total == -torch.inf, 0.0)", "total"),
        mistake="exp(lse) overflows for a large lse, and is 0 for a very negative one. Take exp of differences " "only: exp(lse - lse_new).",
    ),
    # lse in base two
    Edit("total = torch.logaddexp(lse, more_lse)", "total = torch.logaddexp2(lse, more_lse)"),
    # one weight for all rows
    Edit("exp(lse - finite)[..., None]", "exp(lse - finite).mean()"),
    # shares swapped
    Edit(
        "exp(lse - finite)[..., None] * out + torch.exp(more_lse - finite)",
        "exp(more_lse - finite)[..., None] * out + torch.exp(lse - finite)",
        mistake="The shares are exchanged: `out` counts with exp(lse - lse_new), `more` with exp(more_lse - " "lse_new).",
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
# mistake: Each piece is already divided by its own sum; weigh it with exp(lse - lse_new).
import torch
import torch.distributed as dist
import torch.nn.functional as F
def merge(out, lse, more, more_lse):
    return out + more, torch.logaddexp(lse, more_lse)


# %% wrong: averages
# mistake: This is the average. Each piece counts with its share of the whole sum, exp(lse - lse_new).
import torch
import torch.distributed as dist
import torch.nn.functional as F
def merge(out, lse, more, more_lse):
    return (out + more) / 2, torch.logaddexp(lse, more_lse)


# %% wrong: empty for all or none
# mistake: A piece may be empty for some queries and not for others: decide row by row.
import torch


def merge(out, lse, more, more_lse):
    if torch.isinf(lse).any():
        return more, more_lse
    if torch.isinf(more_lse).any():
        return out, lse
    t = torch.logaddexp(lse, more_lse)
    return (lse - t).exp()[..., None] * out + (more_lse - t).exp()[..., None] * more, t


# %% wrong: larger piece whole
# mistake: The shares do not add up to 1: the larger piece counts whole. Divide by the *new* sum.
import torch


def merge(out, lse, more, more_lse):
    m = torch.maximum(lse, more_lse)
    ref = m.masked_fill(m == -torch.inf, 0)
    a, b = (lse - ref).exp(), (more_lse - ref).exp()
    return a[..., None] * out + b[..., None] * more, torch.logaddexp(lse, more_lse)


# %% wrong: lse of the larger
# mistake: out is right; lse is that of the larger piece alone, and the smaller one has its sum, too.
import torch


def merge(out, lse, more, more_lse):
    both = torch.stack((lse, more_lse))
    weights = both.softmax(0).nan_to_num(0.0)
    return torch.einsum("pan,pand->and", weights, torch.stack((out, more))), torch.maximum(lse, more_lse)


# %% wrong: shares of the logarithms
# mistake: An lse is a logarithm. The shares are ratios of the sums, exp(lse), not of their logarithms.
import torch


def merge(out, lse, more, more_lse):
    w = torch.nan_to_num(lse / (lse + more_lse))
    return w[..., None] * out + (1 - w)[..., None] * more, torch.logaddexp(lse, more_lse)
# %% wrong: changes lse
import torch


def merge(out, lse, more, more_lse):
    before = lse.clone()
    torch.logaddexp(lse, more_lse, out=lse)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.exp(before - finite)[..., None] * out + torch.exp(more_lse - finite)[..., None] * more, lse


