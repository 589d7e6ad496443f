from labkit.answers import Edit, Same

_ORDER = "probs.masked_fill(~map, -1.0).argsort(dim=0, descending=True)"
_RETURN = "    return probs * kept, kept"
_NOT_CHOSEN = "Some expert gets tokens that did not choose it: kept means chosen *and* among the heaviest."
_WEIGHT_0 = "A token may have chosen with the weight 0: it is dropped only where there is no room."

WRONG = [
    Edit(_RETURN, f"    least = probs.gather(0, order)[:capacity][-1]\n    kept = map & (probs >= least)\n{_RETURN}",
         mistake="Where tokens weigh the same, an expert gets more than it has room for: at most C are kept, whichever "
         "of the equal ones they are."),
    Edit("dim=0, descending", "dim=1, descending", ("scatter(0, order[:capacity]", "scatter(1, order[:, :capacity]"),
         mistake="That limits the experts of a token. The capacity limits the tokens of an *expert*: go down the "
         "columns."),
    Edit("    kept =", "    every = probs.masked_fill(~map, -1.0).flatten().argsort(descending=True)\n"
         "    every = every[: capacity * map.shape[1]]\n"
         "    kept = torch.zeros_like(map).flatten().scatter(0, every, True).view_as(map) & map\n"
         f"{_RETURN}\n    kept =", mistake="Here all experts share the room of all. Each expert has room for C."),
    Edit(_RETURN, f"    kept = map & (map.cumsum(0) <= capacity)\n{_RETURN}",
         mistake="Those are the first to come. Keep the heaviest."),
    Edit(_ORDER, "probs.masked_fill(~map, 2.0).argsort(dim=0)", mistake="Those are the lightest. Keep the heaviest."),
    Edit(_RETURN, f"    kept = kept & (kept == map).all(1, keepdim=True)\n{_RETURN}",
         mistake="A token that one expert drops is dropped by its others, too. Each expert decides for itself."),
    Edit(" & map", "", mistake=_NOT_CHOSEN),
    Edit(_ORDER, "probs.topk(min(capacity, len(map)), dim=0).indices", (" & map", ""), mistake=_NOT_CHOSEN),
    Edit("probs * kept, kept", "probs, kept", mistake="What is dropped still has its weight: in `probs` it is 0."),
    Edit("probs * kept, kept", "probs * kept, map",
         mistake="`map` must say who is left: rows that are dropped do not travel."),
    Edit("probs * kept, kept", "probs * kept / (probs * kept).sum(-1, keepdim=True).clamp(min=1e-9), kept",
         mistake="The weights of those that stay do not change: what is dropped is missing."),
    Edit("probs * kept, kept", "(probs * kept).detach(), kept",
         mistake="The weights have no gradient: those of the tokens that stay must keep theirs."),
    # a token that did not choose an expert takes a place with the weight 0
    Edit("probs.masked_fill(~map, -1.0).argsort", "probs.argsort"),
    # a first choice comes before heavier tokens whose second choice it is
    Edit("    order = probs", "    order = (probs + 10 * (probs == probs.amax(1, keepdim=True)))"),
    # what is dropped gets a gradient
    Edit("probs * kept, kept", "probs - (probs * ~kept).detach(), kept"),
    Edit("probs * kept, kept", "probs * kept, (probs * kept) > 0", mistake=_WEIGHT_0),
    Edit(" & map", " & (probs > 0)", mistake=_WEIGHT_0),
    Edit("[:capacity]", "[: max(capacity, 2)]"),
    Edit("[:capacity]", "[: min(capacity, len(map) - 1)]",
         mistake="Here an expert never takes all tokens. With room for all of them it drops none."),
    Edit("[:capacity]", "[: capacity + 1]", mistake="An expert takes one token more than it has room for."),
    Edit("probs * kept, kept", "torch.where(kept, probs, -torch.inf), kept",
         mistake="The weight of what is dropped is 0: `probs` are weights here, not logits."),
    Edit("probs * kept, kept", "probs * kept, kept.float()"),
    Edit("    kept =", "    assert capacity <= len(map)\n    kept ="),
    Edit(_RETURN, f"    map &= kept\n{_RETURN}", told="changes its input `map`"),
    Edit("probs * kept, kept", "probs.mul_(kept), kept", told="changes its input `probs`"),
]

EQUIVALENT = [Same("line 6: 2.0 for 1.0", "either is below any weight")]


# %% right: topk down the columns, scattered into a mask
import torch

def limit(probs, map, capacity):
    top = torch.where(map, probs, -1.0).topk(min(capacity, len(map)), dim=0).indices
    kept = torch.zeros_like(map).scatter(0, top, True) & map
    return torch.where(kept, probs, 0.0), kept


# %% right: expert by expert
import torch

def limit(probs, map, capacity):
    kept = torch.zeros_like(map)
    for e in range(map.shape[1]):
        mine = [t for t in range(len(map)) if map[t, e]]
        for t in sorted(mine, key=lambda t: -float(probs[t, e]))[:capacity]:
            kept[t, e] = True
    return probs * kept, kept


# %% right: one token after the other is dropped, the lightest first
import torch

def limit(probs, map, capacity):
    kept = map.clone()
    for e in range(map.shape[1]):
        while kept[:, e].sum() > capacity:
            kept[probs[:, e].detach().masked_fill(~kept[:, e], 9.0).argmin(), e] = False
    return torch.where(kept, probs, torch.zeros(())), kept


# %% wrong: what is dropped goes to the next expert that has room
# told: kept of those that chose it
import torch

def limit(probs, map, capacity):
    order = probs.masked_fill(~map, -1.0).argsort(dim=0, descending=True)
    kept = torch.zeros_like(map).scatter(0, order[:capacity], True) & map
    for t, e in (map & ~kept).nonzero().tolist():
        other = (e + 1) % map.shape[1]
        if kept[:, other].sum() < capacity:
            kept[t, other] = True
    return probs * kept, kept


# %% right: by rank: how many weigh more, of equal ones those that come first
import torch

def limit(probs, map, capacity):
    p = probs.masked_fill(~map, -1)
    earlier = torch.arange(len(p))[:, None] > torch.arange(len(p))
    above = (p[None] > p[:, None]).sum(1) + ((p[None] == p[:, None]) & earlier[..., None]).sum(1)
    kept = map & (above < capacity)
    return probs.masked_fill(~kept, 0), kept
