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


# %% right: an orthogonal basis, then back substitution
import torch
def survivors(got, grads):
    q, r = torch.linalg.qr(torch.stack([g.flatten() for g in grads], 1).double())
    w = torch.linalg.solve_triangular(r, (q.T @ got.flatten().double())[:, None], upper=True)
    return [i for i, x in enumerate(w.flatten().tolist()) if abs(x - 1) < 0.5]


# %% right: the first subset whose rest is small beside the sum
import itertools
def survivors(got, grads):
    n = len(grads)
    return next([*s] for k in range(1, n + 1) for s in itertools.combinations(range(n), k)
                if (sum(grads[i] for i in s) - got).abs().max() <= 1e-4 * max(g.abs().max() for g in grads))


# %% wrong: all
# told: did not survive
def survivors(got, grads):
    return list(range(len(grads)))


# %% wrong: any entry
# told: *all* entries must agree
import itertools

import torch


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            if torch.isclose(sum(grads[i] for i in s), got, atol=1e-5).any():
                return list(s)


# %% wrong: at most one
# told: equals no single gradient
import torch
def survivors(got, grads):
    return [i for i, g in enumerate(grads) if torch.allclose(g, got)]


# %% wrong: at most three
# told: any number
import itertools, torch
def survivors(got, grads):
    n = len(grads)
    def apart(which): return (sum(grads[i] for i in which) - got).norm().item()
    subsets = [range(n), *(s for k in (1, 2, 3) for s in itertools.combinations(range(n), k))]
    return list(min(subsets, key=apart))


# %% wrong: at most two
# told: any number
import itertools, torch
def survivors(got, grads):
    n = len(grads)
    def apart(which): return (sum(grads[i] for i in which) - got).norm().item()
    subsets = [range(n), *((i,) for i in range(n)), *itertools.combinations(range(n), 2)]
    return list(min(subsets, key=apart))


# %% wrong: by angle
# told: one unknown for each
import torch


def survivors(got, grads):
    cosine = torch.nn.functional.cosine_similarity
    return [i for i, g in enumerate(grads) if cosine(g.flatten(), got.flatten(), dim=0) > 0.4]


# %% wrong: by sign of the product
# told: not orthogonal
def survivors(got, grads):
    return [i for i, g in enumerate(grads) if (g * got).sum() > 0]


# %% wrong: changes got
# told: changes
import torch
def survivors(got, grads):
    a = torch.stack([g.flatten() for g in grads], 1)
    w = torch.linalg.lstsq(a, got.flatten()[:, None]).solution.flatten()
    found = [i for i, one in enumerate(w.tolist()) if one > 0.5]
    for i in found:
        got -= grads[i]
    return found


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


# %% wrong: counts from one
# told: got | hidden
import torch
def survivors(got, grads):
    a = torch.stack([g.flatten() for g in grads], 1)
    w = torch.linalg.lstsq(a, got.flatten()[:, None]).solution.flatten()
    return [i + 1 for i, one in enumerate(w.tolist()) if one > 0.5]


# %% wrong: equal in every bit
# told: right only up to rounding
import itertools

import torch


def survivors(got, grads):
    for n in range(1, len(grads) + 1):
        for which in itertools.combinations(range(len(grads)), n):
            if torch.equal(sum(grads[i] for i in which), got):
                return list(which)


# %% wrong: equal in every bit else none
# told: right only up to rounding
import itertools

import torch


def survivors(got, grads):
    for n in range(1, len(grads) + 1):
        for which in itertools.combinations(range(len(grads)), n):
            if torch.equal(sum(grads[i] for i in which), got):
                return list(which)
    return []


# %% wrong: first entry only
# told: one entry of the tensors
import itertools


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            total = sum(grads[i] for i in s)
            if abs(total.flatten()[0] - got.flatten()[0]) <= 1e-4 * got.abs().max():
                return list(s)


# %% wrong: first row only
# told: one unknown for each | one entry
import itertools

import torch


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            total = sum(grads[i] for i in s)
            if torch.allclose(total[0], got[0], rtol=1e-4, atol=float(1e-4 * got.abs().max())):
                return list(s)


# %% wrong: fixed tolerance
# told: tolerance is a fixed number
import itertools

import torch


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            if torch.allclose(sum(grads[i] for i in s), got, atol=1e-2):
                return list(s)


# %% wrong: fixed tolerance of the largest
# told: tolerance is a fixed number
import itertools


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            if (sum(grads[i] for i in s) - got).abs().max() < 0.05:
                return list(s)
    return []


# %% wrong: fixed tolerance of the mean
# told: tolerance is a fixed number
import itertools


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            if (sum(grads[i] for i in s) - got).abs().mean() < 0.1:
                return list(s)


# %% wrong: fixed tolerance of the norm
# told: tolerance is a fixed number
import itertools


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            if (sum(grads[i] for i in s) - got).norm() < 0.5:
                return list(s)


# %% wrong: greedy
# told: decide on all together
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


# %% wrong: leaves out while it helps
# told: leaves out one after the other
def survivors(got, grads):
    kept = list(range(len(grads)))

    def apart(chosen):
        return float((sum(grads[i] for i in chosen) - got).norm())

    while len(kept) > 1:
        best = min(kept, key=lambda i: apart([j for j in kept if j != i]))
        if apart([j for j in kept if j != best]) >= apart(kept):
            break
        kept.remove(best)
    return kept


# %% wrong: mask
# told: asked are the indices
import torch


def survivors(got, grads):
    columns = torch.stack([g.flatten() for g in grads], dim=1).double()
    weights = torch.linalg.lstsq(columns, got.flatten().double()[:, None]).solution[:, 0]
    return [bool(w > 0.5) for w in weights]


# %% wrong: mean of the chosen
# told: with the *mean* of the chosen gradients
from itertools import combinations


def survivors(got, grads):
    n = len(grads)
    choices = [c for k in range(1, n + 1) for c in combinations(range(n), k)]
    return list(min(choices, key=lambda c: (got - sum(grads[i] for i in c) / len(c)).norm().item()))


# %% wrong: nearest alone
# told: the one gradient that is nearest
def survivors(got, grads):
    return [min(range(len(grads)), key=lambda i: (got - grads[i]).norm())]


# %% wrong: neighbours only
# told: only microbatches that follow each other
def survivors(got, grads):
    n = len(grads)
    def apart(which): return (sum(grads[i] for i in which) - got).norm().item()
    return list(min((range(a, b) for a in range(n) for b in range(a + 1, n + 1)), key=apart))


# %% wrong: one is lost at most
# told: any number
def survivors(got, grads):
    n, total = len(grads), sum(grads)
    def apart(which): return (sum(grads[i] for i in which) - got).norm().item()
    return list(min([range(n), *([j for j in range(n) if j != i] for i in range(n))], key=apart))


# %% wrong: only the last
# told: not always the answer
def survivors(got, grads):
    return [len(grads) - 1]


# %% wrong: projections
# told: with the sum by itself
def survivors(got, grads):
    return [i for i, g in enumerate(grads) if float((g * got).sum() / (g * g).sum()) > 0.5]


# %% wrong: the lost ones
# told: microbatches that are *not* in the sum
import torch


def survivors(got, grads):
    """Look for what is missing from the whole sum."""
    columns = torch.stack([g.flatten() for g in grads], dim=1).double()
    missing = sum(grads).flatten().double() - got.flatten().double()
    weights = torch.linalg.lstsq(columns, missing[:, None]).solution[:, 0]
    return [i for i, w in enumerate(weights) if w > 0.5]


# %% wrong: weight exactly one
# told: right up to rounding
import torch


def survivors(got, grads):
    a = torch.stack([g.flatten() for g in grads], 1)
    w = torch.linalg.lstsq(a, got.flatten()[:, None]).solution.flatten()
    return [i for i in range(len(grads)) if w[i] == 1]


# %% wrong: weight not zero
# told: right up to rounding
import torch


def survivors(got, grads):
    a = torch.stack([g.flatten() for g in grads], 1)
    w = torch.linalg.lstsq(a, got.flatten()[:, None]).solution.flatten()
    return [i for i in range(len(grads)) if w[i] != 0]


# %% wrong: within 30 percent
# told: too wide
import itertools


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            if (sum(grads[i] for i in s) - got).norm() < 0.3 * got.norm():
                return list(s)
    return []
