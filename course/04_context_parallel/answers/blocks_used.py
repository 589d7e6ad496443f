from labkit.answers import Edit, Same

_NEGATIVE = "Python counts a negative index from the end"
_NEAREST = "int(torch.stack(apart).argmin())"
_TOLERANCE = (
    "Your tolerance is a number of its own: where gradients are small every block is within it. Take the nearest, or "
    "measure by the size of dq."
)
_MASK = (
    "You try the blocks under another mask than the ring's. At step i it used the places of rank (r - i) mod C, "
         "whatever "
    "block it had."
)

WRONG = [
    Edit("return used", "return [(rank - i) % len(ks) for i in range(len(ks))]",
         mistake="That is which blocks *should* be used. Find out which were."),
    Edit(_NEAREST, f"(rank - {_NEAREST}) % len(ks)",
         mistake="That is how far away the owner is. Return the owner's rank."),
    Edit(_NEAREST, f"({_NEAREST} - rank + step) % len(ks)",
         mistake="That is how many ranks the ring was ahead. Return the rank whose block was used."),
    Edit("return used", "return [(used[0] - i) % len(ks) for i in range(len(ks))]"),
    Edit("at[rank], k_at)", "at[rank], p)", ("for k, v in zip(ks, vs)", "for k, v, p in zip(ks, vs, at)"),
         mistake=_MASK),
    Edit("rank - step", "rank + step", mistake=_MASK),
    Edit(_NEAREST, "next(j for j, one in enumerate(apart) if one < 1e-2)", mistake=_TOLERANCE),
    Edit(_NEAREST, "[bool(one < 1e-3) for one in apart].index(True)", mistake=_TOLERANCE),
    Edit(_NEAREST, "next(j for j, (k, v) in enumerate(zip(ks, vs)) if torch.allclose("
         "piece_backward(dout, q, k, v, out, lse, at[rank], k_at)[0], got, atol=1e-5))", mistake=_TOLERANCE),
    Edit(_NEAREST, "next(j for j, (k, v) in enumerate(zip(ks, vs)) if torch.allclose("
         "piece_backward(dout, q, k, v, out, lse, at[rank], k_at)[0], got, atol=1e-4))", mistake=_TOLERANCE),
    Edit("return used", "return [(rank + 1 - i) % len(ks) for i in range(len(ks))]"),
    Edit("lse, at[rank]", "lse, at[rank] + 10**6"),
    Edit("k_at = at[(rank - step) % len(ks)]", "k_at = at[rank]"),
    Edit("zip(ks, vs)", "zip(ks, [vs[rank]] * len(ks))"),
    # each only once
    Edit(_NEAREST, "min((j for j in range(len(ks)) if j not in used), key=lambda j: float(apart[j]))"),
]

RIGHT = [Edit(_NEAREST, "min(range(len(ks)), key=lambda j: apart[j].item())")]

EQUIVALENT = [Same("line 12: `% len(ks)` dropped", _NEGATIVE)]


# %% right: the formula, and the nearest by the largest difference
import torch

def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    C, used = len(ks), []
    for i, got in enumerate(dqs):
        see = at[rank][:, None] >= at[(rank - i) % C]
        def dq(j):
            p = torch.exp(q @ ks[j].mT / q.shape[-1] ** 0.5 - lse[..., None]).masked_fill(~see, 0)
            return p * (dout @ vs[j].mT - (dout * out).sum(-1, keepdim=True)) @ ks[j] / q.shape[-1] ** 0.5
        used += [min(range(C), key=lambda j: float((dq(j) - got).abs().max()))]
    return used


# %% right: one step after the other, as they are asked for
import torch
from exercises.piece_backward import piece_backward

def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    size = len(ks)
    for step, dq in enumerate(dqs):
        for j in range(size):
            mine = piece_backward(dout, q, ks[j], vs[j], out, lse, at[rank], at[(rank - step) % size])
            if torch.allclose(mine[0], dq, rtol=1e-3, atol=1e-4 * float(dq.norm())):
                yield j
                break
