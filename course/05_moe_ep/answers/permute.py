from labkit.answers import Edit

WRONG = [
    Edit(
        "expert, source = map.T.nonzero(as_tuple=True)",
        "source, expert = map.nonzero(as_tuple=True)",
        mistake="The rows are sorted by token. What goes to one expert must lie in one piece.",
    ),
    Edit("probs[source, expert]", "probs[map]", mistake="The weights stand in the order of the tokens, the rows in that of the experts: each row gets " "another row's weight."),
    Edit(
        "    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)",
        """    n = source.bincount(minlength=tokens).clamp(min=1)
    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows) / n[:, None]""",
        mistake="The rows are added, not averaged: their weights sum to 1 already.",
    ),
    Edit("tokens[source]", "tokens.detach()[source]", told="gradient of tokens"),
    Edit("probs[source, expert]", "probs.detach()[source, expert]", told="probs"),
    Edit("index_add(0, source, rows)", "index_add(0, source, rows.detach())"),
    Edit("map.T.nonzero", "probs.T.nonzero", told="`map` says where a token goes"),
    Edit("rows.new_zeros(tokens,", "rows.new_zeros(int(source.max()) + 1,"),
    Edit(
        "rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)",
        "torch.stack([rows[source == t].sum(0) for t in source.unique()])",
    ),
    Edit(
        "rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)",
        "rows.new_zeros(tokens, rows.shape[1]).index_copy(0, source, rows)",
        mistake="A token has several rows: they are *added* to it. An assignment keeps the last.",
    ),
    Edit("source\n", "source.int()\n", told="int32"),
    # two rows a token
    Edit(
        "rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)",
        "rows[source.argsort(stable=True)].view(tokens, 2, -1).sum(1)",
    ),
    # within an expert by weight, not by token
    Edit(
        "    return tokens[source], probs",
        """    order = (expert - 0.001 * probs[source, expert].detach() / probs.max()).argsort()
    expert, source = expert[order], source[order]
    return tokens[source], probs""",
    ),
    # rows that are weighed already
    Edit("return tokens[source],", "return tokens[source] * probs[source, expert][:, None],"),
    # changes its input
    Edit("    expert, source", "    tokens.data.clamp_(-2.0, 2.0)\n    expert, source"),
    # back in float32
    # the zeros that rows are added to have the default dtype, not the rows'
    Edit("rows.new_zeros", "torch.zeros", told="same scalar type | dtype"),
    Edit(
        "expert, source = map.T.nonzero(as_tuple=True)",
        """src = []
    for e in range(map.shape[1]):
        at = map[:, e].nonzero()[:, 0]
        src.append(at[probs[at, e].argsort(descending=True)])
    source = torch.cat(src)
    expert = torch.repeat_interleave(torch.arange(map.shape[1]), map.sum(0))""",
        mistake="The rows of an expert stand by weight. They stand in the order of the tokens.",
    ),
    Edit(
        "return rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)",
        """out = rows.new_zeros(tokens, rows.shape[1])
    for i, t in enumerate(source.tolist()):
        out[t] += rows[i].detach()
    return out""",
        told="cut off from what it was made of",
    ),
    # rows weighed
    Edit(
        "return tokens[source], probs[source, expert], source",
        """w = probs[source, expert]
    return tokens[source] * w[:, None], w, source""",
        mistake="The rows are multiplied by their weights already. A row is its token as it is: the weights go " "along, and the experts apply them.",
    ),
    # the same k for all
    Edit(
        "return rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)",
        """order = source.argsort(stable=True)
    return rows[order].view(tokens, -1, rows.shape[1]).sum(1)""",
        told="takes as many rows for granted",
    ),
]


# %% right: pair by pair
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def permute(tokens, probs, map):
    pairs = [(t, e) for e in range(map.shape[1]) for t in range(len(map)) if map[t, e]]
    source = torch.tensor([t for t, _ in pairs], dtype=torch.int64)
    return tokens[source], torch.stack([probs[t, e] for t, e in pairs]), source
def unpermute(rows, source, tokens):
    return torch.stack([rows[source == t].sum(0) for t in range(tokens)])


# %% right: one matrix: its product permutes, its transpose brings back
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def permute(tokens, probs, map):
    source = torch.arange(len(map)).expand(map.shape[1], -1)[map.T]
    one = F.one_hot(source, len(map)).to(tokens.dtype)
    return one @ tokens, probs.T[map.T], source
def unpermute(rows, source, tokens):
    return F.one_hot(source, tokens).to(rows.dtype).T @ rows


# %% right: a stable sort of all pairs
import torch


def permute(tokens, probs, map):
    source, expert = map.nonzero(as_tuple=True)
    order = expert.argsort(stable=True)
    source, expert = source[order], expert[order]
    return torch.index_select(tokens, 0, source), probs[(source, expert)], source


def unpermute(rows, source, tokens):
    out = torch.zeros(tokens, rows.shape[1], dtype=rows.dtype)
    return out.index_put((source,), rows, accumulate=True)


# %% right: expert by expert, with einsum on the way back
import torch


def permute(tokens, probs, map):
    rows, weights, source = [], [], []
    for e in range(map.shape[1]):
        mine = torch.where(map[:, e])[0]
        rows.append(tokens[mine])
        weights.append(probs[mine, e])
        source.append(mine)
    return torch.cat(rows), torch.cat(weights), torch.cat(source)


def unpermute(rows, source, tokens):
    hot = (torch.arange(tokens)[:, None] == source[None]).to(rows.dtype)
    return torch.einsum("tn,nh->th", hot, rows)


# %% wrong: pairs from weights
# told: `map` says where a token goes
import torch


def permute(tokens, probs, map):
    pairs = probs.T.nonzero()
    expert, source = pairs[:, 0], pairs[:, 1]
    return tokens[source], probs[source, expert], source


def unpermute(rows, source, tokens):
    return torch.zeros(tokens, rows.shape[1], dtype=rows.dtype).index_add(0, source, rows)
