from labkit.answers import Edit, Same

WRONG = [
    Edit(
        "return probs * kept, kept",
        """left = probs * kept
    return left / left.sum(-1, keepdim=True).clamp(min=1e-9), kept""",
        told="do not change",
    ),
    Edit("return probs * kept, kept", "return probs * kept, map", told="`map` must say"),
    Edit(" & map", "", told="did not choose it"),
    Edit("descending=True", "descending=False"),
    Edit("[:capacity]", "[: capacity + 1]"),
    Edit("[:capacity]", "[:2]"),
    Edit("[:capacity]", "[: max(capacity, 2)]"),
    Edit("return probs * kept, kept", "return probs, kept"),
    Edit("return probs * kept, kept", "return probs * kept, kept.float()"),
    Edit("probs.masked_fill(~map, -1.0).argsort", "probs.argsort", told="with the weight 0"),
    Edit("return probs * kept, kept", "return (probs * kept).detach(), kept", told="weights have no gradient"),
    # all that weigh as much as the last that fits
    Edit(
        "    kept = torch",
        """    least = probs.masked_fill(~map, -1.0).sort(dim=0, descending=True).values[: capacity][-1]
    return probs * (map & (probs >= least)), map & (probs >= least)
    kept = torch""",
        told="at most",
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


# %% right: places by a double argsort
import torch


def limit(probs, map, capacity):
    heavy = torch.where(map, probs, torch.full_like(probs, -1.0))
    place = heavy.argsort(dim=0, descending=True).argsort(dim=0)
    kept = torch.logical_and(map, place < capacity)
    return torch.where(kept, probs, torch.zeros_like(probs)), kept


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
# told: all experts share the room
import torch

def limit(probs, map, capacity):
    key = torch.where(map, probs, -torch.inf).flatten()
    at = key.topk(min(capacity * map.shape[1], key.numel())).indices
    keep = torch.zeros_like(map).flatten().scatter(0, at, True).view_as(map) & map
    return probs * keep, keep


# %% wrong: along the rows
# told: down the columns
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def limit(probs, map, capacity):
    top = probs.topk(min(capacity, probs.shape[1]), dim=1).indices
    kept = torch.zeros_like(map).scatter(1, top, True) & map
    return probs * kept, kept


# %% wrong: by how many weigh more
# told: at most
# by rank: how many weigh more
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def limit(probs, map, capacity):
    p = probs.masked_fill(~map, -1)
    above = (p[None] > p[:, None]).sum(1)
    kept = map & (above < capacity)
    return probs.masked_fill(~kept, 0), kept


# %% wrong: first choices first
# told: Only the weights decide
import torch

def limit(probs, map, capacity):
    first = torch.zeros_like(map).scatter(1, probs.argmax(1, keepdim=True), True) & map
    key = torch.where(map, probs + 10 * first, -torch.inf)
    at = key.topk(min(capacity, len(map)), 0).indices
    keep = torch.zeros_like(map).scatter(0, at, True) & map
    return probs * keep, keep


# %% wrong: first to come
# told: first to come
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def limit(probs, map, capacity):
    kept = map & (map.cumsum(0) <= capacity)
    return probs * kept, kept


# %% wrong: gradient of what is dropped
# told: still gets a gradient
import torch

def limit(probs, map, capacity):
    key = torch.where(map, probs, -torch.inf)
    at = key.topk(min(capacity, len(map)), 0).indices
    keep = torch.zeros_like(map).scatter(0, at, True) & map
    return probs - (probs * ~keep).detach(), keep


# %% wrong: loses places
# told: with the weight 0
import torch


def limit(probs, map, capacity):
    i = probs.topk(min(capacity, len(probs)), 0).indices
    keep = torch.zeros_like(map).scatter(0, i, True) & map
    return probs * keep, keep


# %% wrong: map from weights
# who is kept is read off the weights: a weight of 0 is taken for a token that was dropped
import torch


def limit(probs, map, capacity):
    order = probs.masked_fill(~map, -1.0).argsort(dim=0, descending=True)
    left = probs * torch.zeros_like(map).scatter(0, order[:capacity], True) * map
    return left, left > 0


# %% wrong: the lightest
# told: Those are the lightest
import torch

def limit(probs, map, capacity):
    key = torch.where(map, -probs, -torch.inf)
    at = key.topk(min(capacity, len(map)), 0).indices
    keep = torch.zeros_like(map).scatter(0, at, True) & map
    return probs * keep, keep


# %% wrong: whole tokens
# told: decides for itself
import torch

def limit(probs, map, capacity):
    key = torch.where(map, probs, -torch.inf)
    at = key.topk(min(capacity, len(map)), 0).indices
    keep = torch.zeros_like(map).scatter(0, at, True) & map
    whole = (keep == map).all(-1, keepdim=True)
    keep = map & whole
    return probs * keep, keep
