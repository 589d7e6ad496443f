from labkit.answers import Edit

WRONG = [
    Edit(
        "best.values.softmax(-1)",
        "best.values.softmax(-1).detach()",
        ("return probs,", "return probs + 0 * weight.float().sum(),"),
        mistake="The weights have no gradient, and so the router learns nothing: they must stay differentiable.",
    ),
    Edit("best.values.softmax(-1)", "torch.full_like(best.values, 1 / k) + 0 * best.values", mistake="The weights are the softmax of the chosen logits; equal ones teach the router nothing."),
    Edit("best.values.softmax(-1)", "best.values.exp() / best.values.exp().sum(-1, keepdim=True)", mistake="exp of a large logit overflows."),
    Edit("x.float() @ weight.float().T", "(x @ weight.T).float()", mistake="The logits were rounded to bf16, and some tokens go elsewhere. Cast x and weight to fp32 " "*before* the product."),
    Edit("return probs,", "return best.values.softmax(-1),", told="a column for each expert"),
    Edit(
        "return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, best.indices, True)",
        "return probs, probs > 0",
        mistake="A chosen expert may weigh 0, and the token goes there all the same: `map` says who is chosen, " "not who weighs something.",
    ),
    Edit("return probs,", "return probs.to(x.dtype),", mistake="The weights must be fp32, whatever the tokens are."),
    Edit("best = logits.topk(k, dim=-1)", "best = logits.topk(2, dim=-1)"),
    Edit("best = logits.topk(k, dim=-1)", "best = logits.topk(max(k, 2), dim=-1)"),
    Edit("best = logits.topk(k, dim=-1)", "best = logits.topk(min(k, 3), dim=-1)"),
    # all that are as good as the k-th: more than k where experts tie
    Edit(
        """    best = logits.topk(k, dim=-1)
""",
        """    map = logits >= logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(~map, -torch.inf).softmax(-1), map
    best = logits.topk(k, dim=-1)
""",
        mistake="Where experts are equally good, a token goes to exactly k of them all the same. Here it goes to " "all that are as good as the k-th.",
    ),
    Edit("x.float() @ weight", "x.detach().float() @ weight", mistake="That is the softmax over all experts. Here it is over the k chosen ones: the weights of a token " "sum to 1."),
    Edit("x.float() @ weight.float().T", "(x.half() @ weight.half().T).float()"),
    Edit("x.float() @ weight.float().T", "(x.to(weight.dtype) @ weight.T).float()"),
    Edit("x.float() @ weight.float().T", "(x @ weight.to(x.dtype).T).float()"),
    Edit("best.values.softmax(-1)", "best.values.to(x.dtype).softmax(-1).float()"),
    Edit(
        "best.values.softmax(-1)",
        "(best.values - logits.max()).exp() / (best.values - logits.max()).exp().sum(-1, keepdim=True)",
    ),
    Edit("best.values.softmax(-1)", "best.values.softmax(0)"),
    Edit("best.values.softmax(-1)", "(best.values / k).softmax(-1)"),
    Edit("logits = x.float()", "logits = x.float().abs()"),
    Edit("dtype=torch.bool).scatter(1, best.indices, True)", "dtype=torch.int64).scatter(1, best.indices, 1)"),
]


# %% right: a softmax of masked logits
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def route(x, weight, k):
    logits = F.linear(x.float(), weight.float())
    map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(k).indices, True)
    return logits.masked_fill(~map, -torch.inf).softmax(-1), map


# %% right: in double, token by token
import torch
def route(x, weight, k):
    probs, map = [], []
    for row in x:
        logits = weight.double() @ row.double()
        m = torch.zeros(len(logits), dtype=torch.bool)
        m[logits.argsort(descending=True)[:k]] = True
        e = (logits - logits.max()).exp() * m
        probs.append((e / e.sum()).float())
        map.append(m)
    return torch.stack(probs), torch.stack(map)


# %% right: a one-hot sum of the k choices
import torch.nn.functional as F


def route(x, weight, k):
    logits = x.float().matmul(weight.float().t())
    values, places = logits.sort(dim=1, descending=True)
    values, hot = values[:, :k].softmax(1), F.one_hot(places[:, :k], logits.shape[1])
    return (values.unsqueeze(-1) * hot).sum(1), hot.sum(1).bool()


# %% right: argmax k times, weights by exp
import torch

def route(x, weight, k):
    logits = torch.einsum("th,eh->te", x.to(torch.float32), weight.to(torch.float32))
    left, taken = logits.clone(), []
    for _ in range(k):
        best = left.argmax(-1, keepdim=True)
        taken.append(best)
        left = left.scatter(1, best, -torch.inf)
    at = torch.cat(taken, 1)
    w = torch.exp(logits.gather(1, at) - logits.max(-1, keepdim=True).values.detach())
    w = w / w.sum(-1, keepdim=True)
    probs = torch.zeros_like(logits).scatter(1, at, w)
    return probs, torch.zeros_like(logits).scatter(1, at, 1).bool()


# %% wrong: beside zeros
# mistake: The softmax runs over all places, with 0 in the place of the logits that are not chosen. But exp(0) is 1: they take a part of the sum.
import torch

def route(x, weight, k):
    logits = x.float() @ weight.float().T
    m = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(k).indices, True)
    return (logits * m).softmax(-1) * m, m


# %% wrong: chosen by experts
# mistake: Here each expert chooses k tokens. Each *token* chooses k experts.
import torch

def route(x, weight, k):
    logits = x.float() @ weight.float().T
    at = logits.topk(k, 0).indices
    m = torch.zeros_like(logits, dtype=torch.bool).scatter(0, at, True)
    return logits.masked_fill(~m, -torch.inf).softmax(-1).nan_to_num(), m


# %% wrong: down the tokens
# mistake: This softmax runs over the tokens. The weights of one *token* sum to 1.
import torch

def route(x, weight, k):
    logits = x.float() @ weight.float().T
    m = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(k).indices, True)
    return logits.masked_fill(~m, -torch.inf).softmax(0).nan_to_num(), m


# %% wrong: in front
# mistake: The weights stand in the first k columns. The column of a weight is its expert.
import torch

def route(x, weight, k):
    logits = x.float() @ weight.float().T
    top = logits.topk(k)
    probs = torch.zeros_like(logits)
    probs[:, :k] = top.values.softmax(-1)
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, top.indices, True)


# %% wrong: keeps all experts
# mistake: Every expert gets every token. Keep the k largest.
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def route(x, weight, k):
    p = (x.float() @ weight.float().T).softmax(-1)
    return p, p >= 0


# %% wrong: no gradient to x
# mistake: x gets no gradient: through the weights the router teaches the layers before it, too.
import torch

def route(x, weight, k):
    logits = x.detach().float() @ weight.float().T
    m = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(k).indices, True)
    return logits.masked_fill(~m, -torch.inf).softmax(-1), m


# %% wrong: softmax twice
# mistake: That is a softmax of a softmax: the weights come out nearly equal. The softmax over the chosen ones is taken of their *logits*.
# the softmax over all, of its k largest values a softmax again
import torch


def route(x, weight, k):
    p = (x.float() @ weight.float().T).softmax(-1)
    best = p.topk(k, dim=-1)
    probs = torch.zeros_like(p).scatter(1, best.indices, best.values.softmax(-1))
    return probs, torch.zeros_like(p, dtype=torch.bool).scatter(1, best.indices, True)
# %% wrong: chosen by weights of zero
# told: hidden
# the k largest weights: where logits lie far apart, several are 0 and one is as good as another
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def route(x, weight, k):
    p = (x.float() @ weight.float().T).softmax(-1)
    v, i = p.topk(k)
    z = torch.zeros_like(p)
    return z.scatter(1, i, v / v.sum(-1, keepdim=True)), z.scatter(1, i, 1).bool()


# %% wrong: only the k weights
# told: not [T, E]
import torch


def route(x, weight, k):
    best = (x.float() @ weight.float().T).topk(k)
    return best.values.softmax(-1), best.indices


