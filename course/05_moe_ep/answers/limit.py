from labkit.answers import Edit, Same

WRONG = [
    Edit(
        "return probs * kept, kept",
        """left = probs * kept
    return left / left.sum(-1, keepdim=True).clamp(min=1e-9), kept""",
        mistake="The weights of those that stay do not change: what is dropped is missing.",
    ),
    Edit("return probs * kept, kept", "return probs * kept, map", mistake="`map` must say who is left: rows that are dropped do not travel."),
    Edit(" & map", "", mistake="Some expert gets tokens that did not choose it: kept means chosen *and* among the heaviest."),
    Edit("descending=True", "descending=False"),
    Edit("[:capacity]", "[: capacity + 1]"),
    Edit("[:capacity]", "[:2]"),
    Edit("[:capacity]", "[: max(capacity, 2)]"),
    Edit("return probs * kept, kept", "return probs, kept"),
    Edit("return probs * kept, kept", "return probs * kept, kept.float()"),
    Edit("probs.masked_fill(~map, -1.0).argsort", "probs.argsort", mistake="A token that did not choose an expert takes a place there from one that did, with the weight 0: " "only those that chose it compete."),
    Edit("return probs * kept, kept", "return (probs * kept).detach(), kept", mistake="The weights have no gradient: those of the tokens that stay must keep theirs."),
    # all that weigh as much as the last that fits
    Edit(
        "    kept = torch",
        """    least = probs.masked_fill(~map, -1.0).sort(dim=0, descending=True).values[: capacity][-1]
    return probs * (map & (probs >= least)), map & (probs >= least)
    kept = torch""",
        mistake="Where tokens weigh the same, an expert gets more than it has room for: at most C are kept, " "whichever of the equal ones they are.",
    ),
    # the capacity of all experts together
    Edit(
        "    order =",
        """    every = probs.masked_fill(~map, -1.0).flatten().argsort(descending=True)[: capacity * map.shape[1]]
    kept = torch.zeros_like(map).flatten().scatter(0, every, True).view_as(map) & map
    return probs * kept, kept
    order =""",
    ),
    Edit("dim=0, descending=True)\n", "dim=0, descending=True)\n    assert capacity <= len(map)\n"),
    # changes its inputs
    Edit("return probs * kept, kept", "map &= kept\n    return probs * kept, kept"),
    Edit("return probs * kept, kept", "return probs.mul_(kept), kept"),
]

EQUIVALENT = [
    Same("line 6: 2.0 for 1.0", "either is below any weight"),
]


# %% right: topk down the columns, scattered into a mask
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def limit(probs, map, capacity):
    top = torch.where(map, probs, -1.0).topk(min(capacity, len(map)), dim=0).indices
    kept = torch.zeros_like(map).scatter(0, top, True) & map
    return torch.where(kept, probs, 0.0), kept


# %% right: expert by expert
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def limit(probs, map, capacity):
    kept = torch.zeros_like(map)
    for e in range(map.shape[1]):
        mine = [t for t in range(len(map)) if map[t, e]]
        for t in sorted(mine, key=lambda t: -float(probs[t, e]))[:capacity]:
            kept[t, e] = True
    return probs * kept, kept


# %% right: by rank: how many weigh more, of equal ones those that come first
import torch
def limit(probs, map, capacity):
    p = probs.masked_fill(~map, -1)
    earlier = torch.arange(len(p))[:, None] > torch.arange(len(p))
    above = (p[None] > p[:, None]).sum(1) + ((p[None] == p[:, None]) & earlier[..., None]).sum(1)
    kept = map & (above < capacity)
    return probs.masked_fill(~kept, 0), kept


# %% right: expert by expert, the heaviest by argsort
import torch

def limit(probs, map, capacity):
    keep = torch.zeros_like(map)
    for e in range(map.shape[1]):
        at = map[:, e].nonzero()[:, 0]
        best = probs.detach()[at, e].argsort(descending=True)[:capacity]
        keep[at[best], e] = True
    return probs * keep, keep


# %% wrong: all experts together
# mistake: Here all experts share the room of all. Each expert has room for C.
import torch

def limit(probs, map, capacity):
    key = torch.where(map, probs, -torch.inf).flatten()
    at = key.topk(min(capacity * map.shape[1], key.numel())).indices
    keep = torch.zeros_like(map).flatten().scatter(0, at, True).view_as(map) & map
    return probs * keep, keep


# %% wrong: along the rows
# mistake: That limits the experts of a token. The capacity limits the tokens of an *expert*: go down the columns.
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def limit(probs, map, capacity):
    top = probs.topk(min(capacity, probs.shape[1]), dim=1).indices
    kept = torch.zeros_like(map).scatter(1, top, True) & map
    return probs * kept, kept


# %% wrong: first choices first
# mistake: Here a token's first choice comes before heavier tokens whose second choice it is. Only the weights decide.
import torch

def limit(probs, map, capacity):
    first = torch.zeros_like(map).scatter(1, probs.argmax(1, keepdim=True), True) & map
    key = torch.where(map, probs + 10 * first, -torch.inf)
    at = key.topk(min(capacity, len(map)), 0).indices
    keep = torch.zeros_like(map).scatter(0, at, True) & map
    return probs * keep, keep


# %% wrong: first to come
# mistake: Those are the first to come. Keep the heaviest.
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def limit(probs, map, capacity):
    kept = map & (map.cumsum(0) <= capacity)
    return probs * kept, kept


# %% wrong: gradient of what is dropped
# mistake: What is dropped is 0 and still gets a gradient. It has no part in the result: its gradient is 0.
import torch

def limit(probs, map, capacity):
    key = torch.where(map, probs, -torch.inf)
    at = key.topk(min(capacity, len(map)), 0).indices
    keep = torch.zeros_like(map).scatter(0, at, True) & map
    return probs - (probs * ~keep).detach(), keep


# %% wrong: the lightest
# mistake: Those are the lightest. Keep the heaviest.
import torch

def limit(probs, map, capacity):
    key = torch.where(map, -probs, -torch.inf)
    at = key.topk(min(capacity, len(map)), 0).indices
    keep = torch.zeros_like(map).scatter(0, at, True) & map
    return probs * keep, keep


# %% wrong: whole tokens
# mistake: A token that one expert drops is dropped by its others, too. Each expert decides for itself.
import torch

def limit(probs, map, capacity):
    key = torch.where(map, probs, -torch.inf)
    at = key.topk(min(capacity, len(map)), 0).indices
    keep = torch.zeros_like(map).scatter(0, at, True) & map
    whole = (keep == map).all(-1, keepdim=True)
    keep = map & whole
    return probs * keep, keep
# %% wrong: map from weights
# who is kept is read off the weights: a weight of 0 is taken for a token that was dropped
import torch


def limit(probs, map, capacity):
    order = probs.masked_fill(~map, -1.0).argsort(dim=0, descending=True)
    left = probs * torch.zeros_like(map).scatter(0, order[:capacity], True) * map
    return left, left > 0


