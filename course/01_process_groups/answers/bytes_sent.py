from labkit.answers import Edit

WRONG = [
    Edit("2 * once", "once", told="reduce-scatter and then an all-gather"),
    Edit("nbytes * (ranks - 1) / ranks", "nbytes", told="N-1 of N parts"),
    Edit("(ranks - 1) / ranks", "(ranks - 1)", told="one part, n/N bytes"),
    # on one rank nothing travels
    Edit("    return 2", "    once = max(once, nbytes / 2)\n    return 2", told="expected 0.0"),
    Edit("else once", "else max(once, nbytes / 2)", told="hidden"),
]


# %% right: the steps are counted: an all-reduce takes twice N-1 of them
def bytes_sent(op, nbytes, ranks):
    steps = (ranks - 1) * (2 if op == 'all_reduce' else 1)
    return steps * nbytes / ranks


# %% right: exact fractions; what all ranks hold, less a rank's own part
from fractions import Fraction
def bytes_sent(op, nbytes, ranks):
    part = Fraction(nbytes, ranks)
    return float({'all_reduce': 2}.get(op, 1) * (ranks * part - part))


# %% right: it calls itself: an all-reduce is a reduce-scatter and an all-gather
def bytes_sent(op, nbytes, ranks):
    if op == 'all_reduce':
        return bytes_sent('reduce_scatter', nbytes, ranks) + bytes_sent('all_gather', nbytes, ranks)
    return nbytes - nbytes / ranks


# %% right: a Fraction, not rounded to a float
from fractions import Fraction
def bytes_sent(op, nbytes, ranks):
    return Fraction(nbytes * (ranks - 1), ranks) * (2 if op == "all_reduce" else 1)


# %% right: a tensor of no dimensions
import torch
def bytes_sent(op, nbytes, ranks):
    steps = {"all_reduce": 2 * ranks - 2, "all_gather": ranks - 1, "reduce_scatter": ranks - 1}[op]
    return torch.tensor(nbytes, dtype=torch.float64) * steps / ranks


# %% right: a NumPy number, summed over the steps
import numpy
def bytes_sent(op, nbytes, ranks):
    return numpy.full((1 + (op == "all_reduce")) * (ranks - 1), nbytes / ranks).sum()


# %% wrong: counts what arrives
# told: what arrives is not sent
def bytes_sent(op, nbytes, ranks):
    sent = nbytes * (ranks - 1) / ranks
    received = sent
    return (sent + received) * (2 if op == "all_reduce" else 1)


# %% wrong: is the number of steps
# told: number of steps
def bytes_sent(op, nbytes, ranks):
    return (2 if op == "all_reduce" else 1) * (ranks - 1)


# %% wrong: of all ranks together
# told: N times too much
def bytes_sent(op, nbytes, ranks):
    return (2 if op == "all_reduce" else 1) * nbytes * (ranks - 1)


# %% wrong: steps of a tree
# told: those of a tree
import math
def bytes_sent(op, nbytes, ranks):
    return (2 if op == "all_reduce" else 1) * math.log2(ranks) * nbytes / ranks


# %% wrong: takes nbytes for one part
# told: one part, n/N bytes
def bytes_sent(op, nbytes, ranks):
    if op == "all_gather":
        return float(nbytes * (ranks - 1))
    return (2 if op == "all_reduce" else 1) * nbytes * (ranks - 1) / ranks
