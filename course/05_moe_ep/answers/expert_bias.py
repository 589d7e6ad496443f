from labkit.answers import Edit

WRONG = [
    Edit("kept = scores * map", "kept = (scores + bias) * map", mistake="The bias has a say in who is chosen, not in what it counts: the weights are the *scores* of the " "chosen, over their sum."),
    Edit("(scores + bias).topk", "scores.topk", mistake="The choice is by score plus bias."),
    Edit("(counts.mean() - counts)", "(counts - counts.mean())", mistake="An expert with fewer tokens than the mean needs a *larger* bias."),
    Edit("(counts.mean() - counts).sign()", "(counts.mean() - counts)", mistake="The bias moves by the rate, up or down: the sign of the gap, not the gap."),
    Edit("(counts.mean() - counts).sign()", "(counts.mean() - counts) / counts.sum()", mistake="The bias moves by the rate, up or down: the sign of the gap, not the gap."),
    Edit("(scores + bias).topk(k", "(scores + bias).topk(2"),
    Edit("(scores + bias).topk(k", "(scores + bias).topk(max(2, k)"),
    Edit("(scores + bias).topk(k", "(scores * bias.exp()).topk(k"),
    Edit("(scores + bias).topk", "(scores - bias).topk"),
    Edit("kept / kept.sum(-1, keepdim=True)", "kept.masked_fill(~map, -torch.inf).softmax(-1)"),
    Edit("kept / kept.sum(-1, keepdim=True)", "kept / scores.sum(-1, keepdim=True)"),
    Edit("kept / kept.sum(-1, keepdim=True)", "kept"),
    Edit("kept / kept.sum(-1, keepdim=True)", "kept / kept.sum(-1, keepdim=True).clamp(min=1e-2)"),
    Edit("counts.mean()", "counts.median()"),
    Edit("counts.mean()", "(counts.max() + counts.min()) / 2"),
    Edit("(counts.mean() - counts).sign()", "torch.where(counts > counts.mean(), -1.0, 1.0)"),
    Edit("(counts.mean() - counts).sign()", "torch.where(counts < counts.mean(), 1.0, -1.0)"),
    Edit("(counts.mean() - counts).sign()", "(counts.mean() - counts).clamp(-1, 1)"),
    Edit("(counts.mean() - counts).sign()", "(counts.mean() - counts) / counts.mean()"),
    Edit("(counts.mean() - counts).sign()", "(counts.mean().round() - counts).sign()"),
    Edit("bias + rate * (counts.mean() - counts).sign()", "rate * (counts.mean() - counts).sign()"),
    # all that are as good as the k-th
    Edit(
        "    kept = scores * map",
        """    map = scores + bias >= (scores + bias).topk(k, dim=-1).values[:, -1:]
    kept = scores * map""",
        mistake="Where experts are equally good, a token goes to exactly k of them all the same. Here it goes to " "all that are as good as the k-th.",
    ),
    Edit(
        "return kept / kept.sum(-1, keepdim=True)",
        "return (kept / kept.sum(-1, keepdim=True)).detach()",
        mistake="The weights have no gradient: the scores of the chosen experts must get one.",
    ),
    Edit("kept = scores * map", "kept = scores.detach() * map", mistake="The weights have no gradient: the scores of the chosen experts must get one."),
    Edit(
        "    return bias + rate *",
        "    bias += rate *",
        ("(counts.mean() - counts).sign()", "(counts.mean() - counts).sign()\n    return bias"),
        told="changes its input `bias`",
    ),
    # changes the caller's scores
    Edit(
        "(scores + bias).topk",
        "scores.add_(bias).topk",
        ("kept = scores * map", "kept = (scores - bias) * map"),
        told="changes its input",
    ),
    # kept around zero
    # the mean of the biases is taken off after every step
    Edit(
        "return bias + rate * (counts.mean() - counts).sign()",
        """moved = bias + rate * (counts.mean() - counts).sign()
    return moved - moved.mean()""",
        mistake="The bias has a say in who is chosen, not in what it counts: the weights are the *scores* of the " "chosen, over their sum.",
    ),
]

RIGHT = [
    Edit(
        """counts = counts.float()
    return bias + rate * (counts.mean() - counts).sign()""",
        "return bias - rate * torch.sign(counts * len(counts) - counts.sum())",
    ),
]


# %% right: argsort and normalize; the sign from two comparisons
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def choose(scores, bias, k):
    i = (scores + bias).argsort(-1, descending=True)[:, :k]
    w = scores.gather(1, i)
    z = torch.zeros_like(scores)
    return z.scatter(1, i, F.normalize(w, p=1, dim=-1)), z.scatter(1, i, 1.0) > 0
def move_bias(bias, counts, rate):
    even = counts.sum() / len(counts)
    return bias + rate * ((counts < even).float() - (counts > even).float())


# %% right: a loop that takes the best k; signs by torch.where
import torch


def choose(scores, bias, k):
    left, map = (scores + bias).clone(), torch.zeros_like(scores, dtype=torch.bool)
    rows = torch.arange(len(scores))
    for _ in range(k):
        best = left.argmax(1)
        map[rows, best] = True
        left[rows, best] = -torch.inf
    total = torch.einsum("te,te->t", scores, map.to(scores.dtype))
    return scores.masked_fill(~map, 0) / total.unsqueeze(1), map


def move_bias(bias, counts, rate):
    moved = bias.clone()
    moved += rate * torch.sign(counts.double().mean() - counts).to(bias.dtype)
    return moved


# %% right: the chosen by their places, gathered and put back
import torch


def choose(scores, bias, k):
    places = torch.argsort(scores + bias, dim=1, descending=True)[:, :k]
    kept = scores.gather(1, places)
    kept = kept / kept.sum(1, keepdim=True)
    map = torch.zeros(scores.shape, dtype=torch.bool)
    for row, at in zip(map, places):
        row[at] = True
    return torch.zeros_like(scores).scatter(1, places, kept), map


def move_bias(bias, counts, rate):
    share = counts.sum() / len(counts)
    up, down = (counts < share).to(bias.dtype), (counts > share).to(bias.dtype)
    return bias + rate * up - rate * down


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


# %% wrong: bias subtracted
# mistake: The bias is *added* to the score: an expert with a large bias is chosen more often.
import torch

def choose(scores, bias, k):
    at = (scores - bias).topk(k).indices
    m = torch.zeros_like(scores, dtype=torch.bool).scatter(1, at, True)
    s = scores * m
    return s / s.sum(1, keepdim=True), m

def move_bias(bias, counts, rate):
    counts = counts.float()
    return bias - rate * torch.sign(counts.mean() - counts)


# %% wrong: constant sum
# mistake: The sum of the chosen scores depends on the scores, too, and here it gets no gradient.
import torch

def choose(scores, bias, k):
    at = (scores + bias).topk(k).indices
    m = torch.zeros_like(scores, dtype=torch.bool).scatter(1, at, True)
    s = scores * m
    return s / s.sum(1, keepdim=True).detach(), m

def move_bias(bias, counts, rate):
    counts = counts.float()
    return bias + rate * torch.sign(counts.mean() - counts)


# %% wrong: median
# mistake: The counts are compared with their median. Compare them with their mean.
import torch

def choose(scores, bias, k):
    at = (scores + bias).topk(k).indices
    m = torch.zeros_like(scores, dtype=torch.bool).scatter(1, at, True)
    s = scores * m
    return s / s.sum(1, keepdim=True), m

def move_bias(bias, counts, rate):
    return bias + rate * torch.sign(counts.median() - counts)


# %% wrong: softmax of scores
# mistake: That is a softmax of the scores. Here the weights are the scores over their sum.
import torch

def choose(scores, bias, k):
    at = (scores + bias).topk(k).indices
    m = torch.zeros_like(scores, dtype=torch.bool).scatter(1, at, True)
    return scores.masked_fill(~m, -torch.inf).softmax(-1), m

def move_bias(bias, counts, rate):
    counts = counts.float()
    return bias + rate * torch.sign(counts.mean() - counts)
