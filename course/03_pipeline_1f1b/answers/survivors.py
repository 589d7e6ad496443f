from labkit.answers import Edit, Same

_RETURN = "[i for i, weight in enumerate(weights.tolist()) if weight > 0.5]"
_GREEDY = """    rest, found = got, []
    for _ in grads:
        best = min(set(range(len(grads))) - set(found), key=lambda i: float((rest - grads[i]).norm()))
        if (rest - grads[best]).norm() < rest.norm():
            found, rest = [*found, best], rest - grads[best]
    return sorted(found)
"""

WRONG = [
    Edit("    columns", f"{_GREEDY}    columns", mistake="This takes the nearest gradient, then the nearest to the rest, and keeps what it has taken. The nearest need not be in the sum: decide on all together."),
    Edit(_RETURN, "list(range(len(grads)))", mistake="This finds all, but some did not survive."),
    Edit("[i for i", "[i + 1 for i", mistake="The indices count from 1 here, not from 0."),
    Edit(_RETURN, "[weight > 0.5 for weight in weights.tolist()]", mistake="This says of each microbatch whether it is in the sum; asked are the indices of those that are."),
    Edit("weight > 0.5", "weight < 0.5", mistake="These are the microbatches that are *not* in the sum."),
    Edit(_RETURN, "[min(range(len(grads)), key=lambda i: (got - grads[i]).norm())]", mistake="This finds the one gradient that is nearest to the sum; any number may be in it."),
    Edit(_RETURN, "[i for i, g in enumerate(grads) if torch.allclose(g, got)]", mistake="This finds a gradient only where it is the whole sum; several may be in it."),
    Edit(_RETURN, "[i for i, g in enumerate(grads) if (g * got).sum() > 0.5 * (g * g).sum()]", mistake="This compares each gradient with the sum by itself. The gradients are like each other, so one that is lost resembles the sum, too: decide on all together."),
    Edit(_RETURN, f"{_RETURN}[::-1]", mistake="These are the right ones, but not in order."),
    Edit(_RETURN, "[i for i, g in enumerate(grads) if (g * got).sum() > 0]"),
    Edit(_RETURN, "[len(grads) - 1]"),
    Edit(_RETURN, "[i for i, g in enumerate(grads) if torch.cosine_similarity(g.flatten(), got.flatten(), dim=0) > 0.4]"),
    Edit("weight > 0.5", "weight != 0"),
    Edit("weight > 0.5", "weight == 1"),
    Edit("grad.flatten() for", "grad.flatten()[:1] for", ("got.flatten()[:, None]", "got.flatten()[:1, None]")),
    Edit("    columns", "    for grad in grads:\n        grad /= grad.norm()\n    columns", told="changes its input `grads`"),
]

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


# %% wrong: fixed tolerance
# mistake: Your tolerance is a fixed number. It is too wide where the gradients are tiny, and too narrow where they are large: compare what is left with the size of the gradients.
import itertools

import torch


def survivors(got, grads):
    for k in range(1, len(grads) + 1):
        for s in itertools.combinations(range(len(grads)), k):
            if torch.allclose(sum(grads[i] for i in s), got, atol=1e-2):
                return list(s)
