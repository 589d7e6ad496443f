from labkit.answers import Edit

WRONG = [
    Edit("2 * once", "once", mistake="An all-reduce is a reduce-scatter and then an all-gather."),
    Edit("nbytes * (ranks - 1) / ranks", "nbytes", mistake="Each rank already has its own part: N-1 of N parts travel."),
    Edit("(ranks - 1) / ranks", "(ranks - 1)", mistake="N times too much. In a step a rank sends one part, n/N bytes."),
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


# %% right: a tensor of no dimensions
import torch
def bytes_sent(op, nbytes, ranks):
    steps = {"all_reduce": 2 * ranks - 2, "all_gather": ranks - 1, "reduce_scatter": ranks - 1}[op]
    return torch.tensor(nbytes, dtype=torch.float64) * steps / ranks


# %% wrong: counts what arrives
# mistake: Twice too much. An all-gather or a reduce-scatter is one phase of two, and what arrives is not sent.
def bytes_sent(op, nbytes, ranks):
    sent = nbytes * (ranks - 1) / ranks
    received = sent
    return (sent + received) * (2 if op == "all_reduce" else 1)


# %% wrong: is the number of steps
# mistake: This is the number of steps. Asked are the bytes that are sent in all of them.
def bytes_sent(op, nbytes, ranks):
    return (2 if op == "all_reduce" else 1) * (ranks - 1)


# %% wrong: steps of a tree
# mistake: You count log2 N steps, those of a tree. In a ring a part passes every rank.
import math
def bytes_sent(op, nbytes, ranks):
    return (2 if op == "all_reduce" else 1) * math.log2(ranks) * nbytes / ranks


