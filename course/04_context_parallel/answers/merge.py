from labkit.answers import Edit

_SUM = "torch.exp(lse - finite)[..., None] * out + torch.exp(more_lse - finite)[..., None] * more"
_FINITE = "total.masked_fill(total == -torch.inf, 0.0)"
_OVERFLOW = "exp(lse) overflows for a large lse, and is 0 for a very negative one. Take exp of differences only."

WRONG = [
    Edit(_SUM, "out + more",
         mistake="These are sums. Each piece is divided by its own sum already: it must be weighed before they add."),
    Edit(_SUM, "(out + more) / 2", mistake="This is the average. Each piece counts with its share of the whole sum."),
    Edit("more, total", "more, lse + more_lse",
         mistake="The sums add, not their logarithms: lse_new = log(exp(lse) + exp(more_lse))."),
    Edit("torch.exp(lse - finite)", "(lse / (lse + more_lse))",
         ("torch.exp(more_lse - finite)", "(more_lse / (lse + more_lse))"),
         mistake="An lse is a logarithm. The shares are ratios of the sums, exp(lse), not of their logarithms."),
    Edit("exp(lse - finite)[..., None] * out + torch.exp(more_lse - finite)",
         "exp(more_lse - finite)[..., None] * out + torch.exp(lse - finite)",
         mistake="The shares are exchanged: `out` counts with that of lse, `more` with that of more_lse."),
    Edit(_FINITE, "torch.maximum(lse, more_lse).nan_to_num(neginf=0.0)",
         mistake="The shares do not add up to 1: the larger piece counts whole. Divide by the *new* sum."),
    Edit("more, total", "more, torch.maximum(lse, more_lse)",
         mistake="out is right; lse is that of the larger piece alone, and the smaller one has its sum, too."),
    Edit(_FINITE, "total",
         mistake="Where neither has seen anything, -inf minus -inf is no number, and out must stay 0."),
    Edit("torch.logaddexp(lse, more_lse)", "(lse.exp() + more_lse.exp()).log()", mistake=_OVERFLOW),
    # shares of the sums themselves, lse by logaddexp
    Edit(_SUM, "((lse.exp()[..., None] * out + more_lse.exp()[..., None] * more) / (lse.exp() + more_lse.exp())[..., None])",
         mistake=_OVERFLOW),
    Edit(_SUM, "((lse.exp()[..., None] * out + more_lse.exp()[..., None] * more)"
         " / (lse.exp() + more_lse.exp())[..., None]).nan_to_num(0.0)", mistake=_OVERFLOW),
    Edit("torch.logaddexp(lse, more_lse)", "(lse.exp() + more_lse.exp()).log()", (_FINITE, "total"), mistake=_OVERFLOW),
    Edit("    total =", "    if lse.isinf().any():\n        return more, more_lse\n"
         "    if more_lse.isinf().any():\n        return out, lse\n    total =",
         mistake="A piece may be empty for some queries and not for others: decide row by row."),
    Edit("logaddexp(", "logaddexp2("),
    Edit("    total =", "    out, lse, more, more_lse = out.float(), lse.float(), more.float(), more_lse.float()\n    total =",
         told="float32, not float64"),
    Edit("exp(lse - finite)[..., None]", "exp(lse - finite).mean()"),
    Edit("total = torch.logaddexp(lse, more_lse)",
         "before = lse.clone()\n    total = torch.logaddexp(lse, more_lse, out=lse)",
         ("exp(lse - finite)", "exp(before - finite)"), told="changes its input `lse`"),
]


# %% right: the maximum is subtracted by hand
import torch

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


# %% right: from out towards more, by the share of more
import torch

def merge(out, lse, more, more_lse):
    total = torch.logaddexp(lse, more_lse)
    share = torch.exp(more_lse - total.masked_fill(total == -torch.inf, 0.0))[..., None]
    return out + (more - out) * share, total


# %% right: softmax over a stack of two
import torch

def merge(out, lse, more, more_lse):
    both = torch.stack((lse, more_lse))
    weights = both.softmax(0).nan_to_num(0.0)
    return torch.einsum("pan,pand->and", weights, torch.stack((out, more))), both.logsumexp(0)
