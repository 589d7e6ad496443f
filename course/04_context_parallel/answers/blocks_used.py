from labkit.answers import Edit, Same

_NEGATIVE = "Python counts a negative index from the end"

WRONG = [
    Edit("k_at = at[(rank - step) % len(ks)]", "k_at = at[rank]", ("argmin", "argmax"), told="At step i the mask"),
    # the first block within a tolerance of its own
    Edit(
        "int(torch.stack(apart).argmin())",
        "next(j for j, one in enumerate(apart) if one < 1e-2)",
        mistake="Your tolerance is a number of its own: where gradients are small every block is within it. Take " "the nearest, or measure by the size of dq.",
    ),
    Edit("int(torch.stack(apart).argmin())", "[bool(one < 1e-3) for one in apart].index(True)", mistake="Your tolerance is a number of its own: where gradients are small every block is within it. Take " "the nearest, or measure by the size of dq."),
    # as distances
    Edit(
        "int(torch.stack(apart).argmin())",
        "(rank - int(torch.stack(apart).argmin())) % len(ks)",
        mistake="That is how far away the owner is. Return the owner's rank.",
    ),
    # each only once
    Edit(
        "int(torch.stack(apart).argmin())",
        "min((j for j in range(len(ks)) if j not in used), key=lambda j: float(apart[j]))",
    ),
    # first step for all
    Edit("return used", "return [(used[0] - i) % len(ks) for i in range(len(ks))]"),
    # keys only
    Edit("zip(ks, vs)", "zip(ks, [vs[rank]] * len(ks))"),
    # mask of the block
    Edit(
        "apart = [(piece_backward(dout, q, k, v, out, lse, at[rank], k_at)[0] - got).norm() for k, v in zip(ks, vs)]",
        "apart = [(piece_backward(dout, q, k, v, out, lse, at[rank], p)[0] - got).norm() for k, v, p in zip(ks, vs, at)]",
        mistake="You try the blocks under another mask than the ring's. At step i it used the places of rank (r -" " i) mod C, whatever block it had.",
    ),
    # mask of the next
    Edit("k_at = at[(rank - step) % len(ks)]", "k_at = at[(rank + step) % len(ks)]", mistake="You try the blocks under another mask than the ring's. At step i it used the places of rank (r -" " i) mod C, whatever block it had."),
    # no mask at all
    Edit("lse, at[rank]", "lse, at[rank] + 10**6"),
]

RIGHT = [
    Edit(
        "used.append(int(torch.stack(apart).argmin()))",
        "used.append(min(range(len(ks)), key=lambda j: apart[j].item()))",
    ),
]

EQUIVALENT = [
    Same("line 12: `% len(ks)` dropped", _NEGATIVE),
]


# %% right: piece_backward and allclose, whose tolerance is measured by dq
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises.piece_backward import piece_backward
def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    C = len(ks)
    return [next(j for j in range(C) if torch.allclose(piece_backward(dout, q, ks[j], vs[j], out, lse, at[rank], at[(rank - i) % C])[0], dqs[i], rtol=1e-3, atol=1e-4 * dqs[i].abs().max().item())) for i in range(C)]


# %% right: the formula, and the nearest by the largest difference
import torch
import torch.distributed as dist
import torch.nn.functional as F
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


# %% right: all distances at once
import torch
from exercises.piece_backward import piece_backward


def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    C = len(ks)
    nearest = []
    for step, dq in enumerate(dqs):
        there = at[(rank - step) % C]
        tries = [piece_backward(dout, q, ks[j], vs[j], out, lse, at[rank], there)[0].flatten() for j in range(C)]
        nearest.append(torch.cdist(dq.reshape(1, -1), torch.stack(tries)).argmin())
    return torch.stack(nearest)


# %% wrong: as it should be
# mistake: That is which blocks *should* be used. Find out which were.
def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    return [(rank - i) % len(ks) for i in range(len(ks))]


# %% wrong: one block late
# mistake: This ring is not always one ahead. Test every block at every step.
def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    return [(rank + 1 - i) % len(ks) for i in range(len(ks))]


# %% wrong: ranks ahead
# mistake: That is how many ranks the ring was ahead. Return the rank whose block was used.
import torch
from exercises.piece_backward import piece_backward
def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    C = len(ks); used = []
    for i, dq in enumerate(dqs):
        err = [(piece_backward(dout, q, ks[j], vs[j], out, lse, at[rank], at[(rank - i) % C])[0] - dq).norm().item() for j in range(C)]
        used.append((min(range(C), key=err.__getitem__) - rank + i) % C)
    return used


