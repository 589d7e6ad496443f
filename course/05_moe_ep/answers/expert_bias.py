from labkit.answers import Edit

_OVER = "kept / kept.sum(-1, keepdim=True)"
_SIGN = "(counts.mean() - counts).sign()"
_GAP = "The bias moves by the rate, up or down: the sign of the gap, not the gap."
_EVEN = "An expert that has exactly the mean does not move."

WRONG = [
    Edit("(scores + bias).topk", "scores.topk", mistake="The choice is by score plus bias."),
    Edit("(scores + bias).topk", "(scores - bias).topk",
         mistake="The bias is *added* to the score: an expert with a large bias is chosen more often."),
    Edit("scores * map", "(scores + bias) * map",
         mistake="The bias has a say in who is chosen, not in what it counts: the weights "
         "are the *scores* of the chosen, over their sum."),
    Edit(_OVER, "kept", mistake="The weights of a token sum to 1. Here they are the scores as they are."),
    Edit(_OVER, "kept / scores.sum(-1, keepdim=True)", mistake="The sum is that of the *chosen* scores, not of all."),
    Edit(_OVER, "scores.masked_fill(~map, -torch.inf).softmax(-1)",
         mistake="That is a softmax of the scores. Here the weights are the scores over their sum."),
    Edit(_OVER, "kept / kept.detach().sum(-1, keepdim=True)",
         mistake="The sum of the chosen scores is made of scores, too: the gradient goes through it as well."),
    Edit(_OVER, f"({_OVER}).detach()",
         mistake="The weights have no gradient: the scores of the chosen experts must get one."),
    Edit(_SIGN, f"-{_SIGN}", mistake="An expert with fewer tokens than the mean needs a *larger* bias."),
    Edit(_SIGN, "(counts.mean() - counts)", mistake=_GAP),
    Edit(_SIGN, "(counts.mean() - counts) / counts.sum()", mistake=_GAP),
    Edit(_SIGN, "(counts.mean() - counts) / counts.mean()", mistake=_GAP),
    Edit(_SIGN, "torch.where(counts > counts.mean(), -1.0, 1.0)", mistake=_EVEN),
    Edit(_SIGN, "torch.where(counts < counts.mean(), 1.0, -1.0)", mistake=_EVEN),
    # all that are as good as the k-th
    Edit("    kept =", "    map = scores + bias >= (scores + bias).topk(k, dim=-1).values[:, -1:]\n    kept ="),
    Edit("keepdim=True), map", "keepdim=True).detach(), map"),
    Edit("(scores + bias).topk(k", "(scores + bias).topk(max(2, k)"),
    Edit("(scores + bias).topk(k", "(scores * bias.exp()).topk(k"),
    Edit(_OVER, "kept / kept.sum(-1, keepdim=True).clamp(min=1e-2)"),
    Edit("counts.mean()", "counts.median()"),
    Edit("counts.mean()", "(counts.max() + counts.min()) / 2"),
    Edit("counts.mean()", "counts.mean().round()"),
    Edit("counts.mean()", "(counts.sum() // len(counts))",
         mistake="The mean is rounded down here: it need not be a whole number."),
    Edit(_SIGN, "(counts.mean() - counts).clamp(-1, 1)"),
    Edit("return bias + rate", "return rate"),
    # the mean of the biases is taken off after every step
    Edit("return bias +", "bias = bias +", (_SIGN, f"{_SIGN}\n    return bias - bias.mean()")),
    Edit("return bias +", "bias +=", (_SIGN, f"{_SIGN}\n    return bias"), told="changes its input `bias`"),
    Edit("(scores + bias).topk", "scores.add_(bias).topk", ("scores * map", "(scores - bias) * map"),
         told="changes its input"),
]

RIGHT = [Edit(f"bias + rate * {_SIGN}", "bias - rate * torch.sign(counts * len(counts) - counts.sum())")]


# %% right: argsort and normalize; the sign from two comparisons
import torch
import torch.nn.functional as F

def choose(scores, bias, k):
    i = (scores + bias).argsort(-1, descending=True)[:, :k]
    w = scores.gather(1, i)
    z = torch.zeros_like(scores)
    return z.scatter(1, i, F.normalize(w, p=1, dim=-1)), z.scatter(1, i, 1.0) > 0

def move_bias(bias, counts, rate):
    even = counts.sum() / len(counts)
    return bias + rate * ((counts < even).float() - (counts > even).float())


# %% right: token by token, and two masks
import torch

def choose(scores, bias, k):
    probs = torch.zeros_like(scores)
    where = torch.zeros(scores.shape, dtype=torch.bool)
    for t in range(len(scores)):
        at = torch.sort(scores[t].detach() + bias, descending=True).indices[:k]
        mine = scores[t][at]
        probs[t, at] = mine / mine.sum()
        where[t, at] = True
    return probs, where

def move_bias(bias, counts, rate):
    new = bias.clone()
    mean = counts.double().mean()
    new[counts < mean] += rate
    new[counts > mean] -= rate
    return new
