from labkit.answers import Edit

_ROUND = "You round. A part has n/N bytes, which need not be a whole number."

WRONG = [
    Edit("nbytes * (ranks - 1) / ranks", "ranks - 1",
         mistake="This is the number of steps. Asked are the bytes that are sent in all of them."),
    Edit('2 * once if op == "all_reduce" else once', "once",
         mistake="An all-reduce is a reduce-scatter and then an all-gather."),
    Edit("else once", "else 2 * once",
         mistake="Twice too much. An all-gather or a reduce-scatter is one phase of two, and what arrives is not "
                 "sent."),
    Edit("(ranks - 1) / ranks", "(ranks - 1)", mistake="N times too much. In a step a rank sends one part, n/N bytes."),
    Edit("nbytes * (ranks - 1) / ranks", "nbytes",
         mistake="Each rank already has its own part: N-1 of N parts travel."),
    Edit("nbytes * (ranks - 1) / ranks", "nbytes / ranks * __import__('math').log2(ranks)",
         mistake="You count log2 N steps, those of a tree. In a ring a part passes every rank."),
    Edit("* (ranks - 1) / ranks", "* (ranks - 1) // ranks", mistake=_ROUND),
    Edit("nbytes * (ranks - 1) / ranks", "nbytes // ranks * (ranks - 1)", mistake=_ROUND),
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
