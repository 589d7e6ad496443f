from labkit.answers import Same

EQUIVALENT = [
    Same("line 8: `>=` for `>`", "a weight is near 0 or near 1"),
]


# %% right: every subset is tried, the nearest wins
import itertools, torch
def survivors(got, grads):
    n = len(grads)
    def apart(which):
        return (sum((grads[i] for i in which), torch.zeros_like(got)) - got).norm().item()
    return list(min((w for k in range(n + 1) for w in itertools.combinations(range(n), k)), key=apart))


# %% right: a NumPy array of indices, by least squares in NumPy
import numpy
def survivors(got, grads):
    a = numpy.stack([g.numpy().ravel() for g in grads], axis=1).astype("float64")
    w, *_ = numpy.linalg.lstsq(a, got.numpy().ravel().astype("float64"), rcond=None)
    return numpy.flatnonzero(w > 0.5)


# %% right: a torch tensor of indices
import torch
def survivors(got, grads):
    a = torch.stack(list(grads)).flatten(1).T.double()
    w = torch.linalg.pinv(a) @ got.flatten().double()
    return (w.round() == 1).nonzero().squeeze(1)


# %% right: a generator; a binary count through all subsets
import torch
def survivors(got, grads):
    best, found = float("inf"), 0
    flat = torch.stack([g.flatten() for g in grads]).double()
    for bits in range(1, 2 ** len(grads)):
        chosen = torch.tensor([bits >> i & 1 for i in range(len(grads))]).double()
        apart = float((chosen @ flat - got.flatten().double()).norm())
        if apart < best:
            best, found = apart, bits
    yield from (i for i in range(len(grads)) if found >> i & 1)


# %% wrong: all
# mistake: This finds all, but some did not survive. A weight of 1e-8 is a 0 with a rounding error; and a gradient that brings the sum nearer need not be in it.
def survivors(got, grads):
    return list(range(len(grads)))


# %% wrong: any entry
# mistake: One entry that agrees is no proof: *all* entries must agree, up to rounding.
import itertools

import torch


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            if torch.isclose(sum(grads[i] for i in s), got, atol=1e-5).any():
                return list(s)


# %% wrong: at most one
# mistake: It finds none, though several are in the sum. A sum of several equals no single gradient, and it is right only up to rounding: compare with a tolerance, or round the weights.
import torch
def survivors(got, grads):
    return [i for i, g in enumerate(grads) if torch.allclose(g, got)]


# %% wrong: at most three
# mistake: It tries no more than 2 microbatches together; any number may be left.
import itertools, torch
def survivors(got, grads):
    n = len(grads)
    def apart(which): return (sum(grads[i] for i in which) - got).norm().item()
    subsets = [range(n), *(s for k in (1, 2, 3) for s in itertools.combinations(range(n), k))]
    return list(min(subsets, key=apart))


# %% wrong: by sign of the product
# mistake: A positive product is no proof: gradients are not orthogonal, so one that is in the sum can have a negative product with it, and one that is not a positive product.
def survivors(got, grads):
    return [i for i, g in enumerate(grads) if (g * got).sum() > 0]


# %% wrong: counts from one
# mistake: This compares with the *mean* of the chosen gradients; got is their sum.
import torch
def survivors(got, grads):
    a = torch.stack([g.flatten() for g in grads], 1)
    w = torch.linalg.lstsq(a, got.flatten()[:, None]).solution.flatten()
    return [i + 1 for i, one in enumerate(w.tolist()) if one > 0.5]


# %% wrong: first entry only
# mistake: This compares one entry of the tensors; others may differ.
import itertools


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            total = sum(grads[i] for i in s)
            if abs(total.flatten()[0] - got.flatten()[0]) <= 1e-4 * got.abs().max():
                return list(s)


# %% wrong: fixed tolerance
# mistake: Your tolerance is a fixed number. It is too wide where the gradients are tiny, and too narrow where they are large: compare what is left with the size of the gradients.
import itertools

import torch


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            if torch.allclose(sum(grads[i] for i in s), got, atol=1e-2):
                return list(s)


# %% wrong: greedy
# mistake: This begins with all and leaves out one after the other while that helps. What helps most alone need not be what is lost: decide on all together.
import torch
def survivors(got, grads):
    rest, found = got.clone(), []
    left = list(range(len(grads)))
    while left and rest.norm() > 1e-3 * got.norm():
        best = min(left, key=lambda i: float((rest - grads[i]).norm()))
        if (rest - grads[best]).norm() >= rest.norm():
            break
        found.append(best)
        left.remove(best)
        rest = rest - grads[best]
    return sorted(found)


# %% wrong: mask
# mistake: This says of each microbatch whether it is in the sum; asked are the indices of those that are.
import torch


def survivors(got, grads):
    columns = torch.stack([g.flatten() for g in grads], dim=1).double()
    weights = torch.linalg.lstsq(columns, got.flatten().double()[:, None]).solution[:, 0]
    return [bool(w > 0.5) for w in weights]


# %% wrong: nearest alone
# mistake: This finds the one gradient that is nearest to the sum; any number may be in it.
def survivors(got, grads):
    return [min(range(len(grads)), key=lambda i: (got - grads[i]).norm())]


# %% wrong: neighbours only
# mistake: It finds only microbatches that follow each other.
def survivors(got, grads):
    n = len(grads)
    def apart(which): return (sum(grads[i] for i in which) - got).norm().item()
    return list(min((range(a, b) for a in range(n) for b in range(a + 1, n + 1)), key=apart))


# %% wrong: only the last
# mistake: It finds the last one alone; that is not always the answer.
def survivors(got, grads):
    return [len(grads) - 1]


# %% wrong: projections
# mistake: This compares each gradient with the sum by itself. The gradients are like each other, so one that is lost resembles the sum, too: decide on all together.
def survivors(got, grads):
    return [i for i, g in enumerate(grads) if float((g * got).sum() / (g * g).sum()) > 0.5]


# %% wrong: the lost ones
# mistake: These are the microbatches that are *not* in the sum.
import torch


def survivors(got, grads):
    """Look for what is missing from the whole sum."""
    columns = torch.stack([g.flatten() for g in grads], dim=1).double()
    missing = sum(grads).flatten().double() - got.flatten().double()
    weights = torch.linalg.lstsq(columns, missing[:, None]).solution[:, 0]
    return [i for i, w in enumerate(weights) if w > 0.5]


# %% wrong: by angle
# told: one unknown for each
import torch


def survivors(got, grads):
    cosine = torch.nn.functional.cosine_similarity
    return [i for i, g in enumerate(grads) if cosine(g.flatten(), got.flatten(), dim=0) > 0.4]


# %% wrong: changes its gradients
# told: changes its input `grads`
import itertools


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            t = grads[s[0]]
            for i in s[1:]:
                t += grads[i]
            if (t - got).norm() < 1e-4 * got.norm():
                return list(s)
    return []


