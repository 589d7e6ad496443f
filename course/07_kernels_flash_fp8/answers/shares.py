from labkit.answers import Edit

WRONG = [
    Edit(
        "return [torch",
        "return list(map(list, zip(*[torch",
        (" for out in outs]", " for out in outs])))"),
        mistake="[r][j]: a list a rank, and in it the factor of each rank's part.",
    ),
    Edit("outs]", "outs[:1] * len(outs)]"),
    Edit("part.flatten()", "part.abs().flatten()"),
]


# %% right: the normal equations
import torch
import torch.distributed as dist
def shares(outs, parts):
    P = torch.stack([p.flatten() for p in parts]).double()
    return [torch.linalg.solve(P @ P.T, P @ o.flatten().double()).tolist() for o in outs]


# %% right: the pseudo-inverse, in NumPy
import numpy as np
def shares(outs, parts):
    A = np.stack([p.numpy().ravel() for p in parts], 1)
    return [[float(c) for c in np.linalg.pinv(A) @ o.numpy().ravel()] for o in outs]


# %% right: gradient-free: einsum and a Gram matrix, rows as tuples
import torch


def shares(outs, parts):
    P, O = torch.stack(parts).double().flatten(1), torch.stack(outs).double().flatten(1)
    gram = torch.einsum("ik,jk->ij", P, P)
    return tuple(map(tuple, torch.linalg.inv(gram).matmul(P @ O.T).T.tolist()))


# %% right: Gram-Schmidt
import torch
def shares(outs, parts):
    basis = []
    for p in parts:
        v = p.flatten().double()
        c = torch.zeros(len(parts), dtype=torch.float64)
        c[len(basis)] = 1
        for b, cb in basis:
            f = (v @ b) / (b @ b)
            v, c = v - f * b, c - f * cb
        basis.append((v, c))
    result = []
    for o in outs:
        total = torch.zeros(len(parts), dtype=torch.float64)
        for b, cb in basis:
            total += (o.flatten().double() @ b) / (b @ b) * cb
        result.append(total.tolist())
    return result


# %% wrong: assumes ones
# mistake: Find out; do not assume.
def shares(outs, parts):
    return [[1.0] * len(parts) for _ in outs]


# %% wrong: own part is one
# mistake: A rank's own part has an unknown factor, too: it is not always 1.
import torch
def shares(outs, parts):
    return [[1.0 if i == j else (((o - parts[i]) * p).sum() / (p * p).sum()).item() for j, p in enumerate(parts)] for i, o in enumerate(outs)]


# %% wrong: projections
# mistake: The parts are not orthogonal: one factor at a time takes in some of the others.
import torch
import torch.distributed as dist
def shares(outs, parts):
    return [[float((o * p).sum() / (p * p).sum()) for p in parts] for o in outs]


# %% wrong: ratio of norms
# mistake: A norm is of the whole output: it does not say which part it comes from.
import torch
def shares(outs, parts):
    return [[(o.norm() / p.norm()).item() for p in parts] for o in outs]
