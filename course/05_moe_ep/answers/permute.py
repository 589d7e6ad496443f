from labkit.answers import Edit

_PAIRS = "expert, source = map.T.nonzero(as_tuple=True)"
_BACK = "rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)"

WRONG = [
    Edit(_PAIRS, "source, expert = map.nonzero(as_tuple=True)",
         mistake="The rows are sorted by token. What goes to one expert must lie in one piece."),
    Edit(_PAIRS, f"{_PAIRS}\n    order = (expert - 0.001 * probs[source, expert].detach() / probs.max()).argsort()\n"
         "    expert, source = expert[order], source[order]",
         mistake="The rows of an expert stand by weight. They stand in the order of the tokens."),
    Edit("tokens[source]", "tokens[source] * probs[source, expert][:, None]",
         mistake="The rows are multiplied by their weights already. A row is its token as it is: the weights go "
         "along, and the "
         "experts apply them."),
    Edit("probs[source, expert]", "probs[map]",
         mistake="The weights stand in the order of the tokens, the rows in that of the "
         "experts: each row gets another row's weight."),
    Edit(_BACK, f"{_BACK} / source.bincount(minlength=tokens).clamp(min=1)[:, None]",
         mistake="The rows are added, not averaged: their weights sum to 1 already."),
    Edit("index_add", "index_copy",
         mistake="A token has several rows: they are *added* to it. An assignment keeps the last."),
    Edit("map.T.nonzero", "probs.T.nonzero", told="`map` says where a token goes"),
    Edit("tokens[source]", "tokens.detach()[source]", told="gradient of tokens"),
    Edit("probs[source, expert]", "probs.detach()[source, expert]", told="probs"),
    Edit("0, source, rows)", "0, source, rows.detach())", told="cut off from what it was made of"),
    # the same k for all
    Edit(_BACK, "rows[source.argsort(stable=True)].view(tokens, -1, rows.shape[1]).sum(1)",
         mistake="This takes as many rows for granted as tokens times k. A token may have more or fewer than others, or "
         "none."),
    # the zeros that rows are added to have the default dtype, not the rows'
    Edit("rows.new_zeros", "torch.zeros", told="same scalar type | dtype"),
    Edit("source\n", "source.int()\n", told="int32"),
    Edit("rows.new_zeros(tokens,", "rows.new_zeros(int(source.max()) + 1,"),
    Edit(_BACK, "torch.stack([rows[source == t].sum(0) for t in source.unique()])"),
    Edit(_BACK, "rows[source.argsort(stable=True)].view(tokens, 2, -1).sum(1)"),
    Edit(_PAIRS, f"tokens.data.clamp_(-2.0, 2.0)\n    {_PAIRS}"),
]


# %% right: pair by pair
import torch

def permute(tokens, probs, map):
    pairs = [(t, e) for e in range(map.shape[1]) for t in range(len(map)) if map[t, e]]
    source = torch.tensor([t for t, _ in pairs], dtype=torch.int64)
    return tokens[source], torch.stack([probs[t, e] for t, e in pairs]), source

def unpermute(rows, source, tokens):
    return torch.stack([rows[source == t].sum(0) for t in range(tokens)])


# %% right: one matrix: its product permutes, its transpose brings back
import torch
import torch.nn.functional as F

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
