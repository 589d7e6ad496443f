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
    Edit("(ranks - 1) / 2", "(ranks - 1) / ranks",
         mistake="This all-to-all sends each part once. On the ring a part goes on from neighbour to neighbour, and each "
                 "of them sends it."),
    Edit("(ranks - 1) / 2", "(ranks - 1)",
         mistake="In this all-to-all every part goes round the whole ring. A part stops at the rank that it is for."),
    Edit("(ranks - 1) / 2", "(ranks - 1) ** 2 / ranks",
         mistake="In this all-to-all N-1 parts travel in each of N-1 steps. A part stops at the rank that it is for."),
    Edit("(ranks - 1) / 2", "(ranks - 1) / ranks * 2",
         mistake="This is an all-reduce. In an all-to-all nothing is summed, and each part is for one rank."),
    Edit("(ranks - 1) / 2", "ranks / 2", told="expected 12.0"),
    # on one rank nothing travels
    Edit("    return 2", "    once = max(once, nbytes / 2)\n    return 2", told="expected 0.0"),
    Edit("else once", "else max(once, nbytes / 2)", told="hidden"),
]


# %% right: the steps are counted: an all-reduce takes twice N-1 of them
def bytes_sent(op, nbytes, ranks):
    steps = ranks - 1
    if op == 'all_to_all':
        return sum(steps - k for k in range(steps)) * nbytes / ranks
    return steps * (2 if op == 'all_reduce' else 1) * nbytes / ranks


# %% right: exact fractions; what all ranks hold, less a rank's own part
from fractions import Fraction
def bytes_sent(op, nbytes, ranks):
    part = Fraction(nbytes, ranks)
    if op == 'all_to_all':
        return float(part * (ranks * ranks - ranks) / 2)
    return float({'all_reduce': 2}.get(op, 1) * (ranks * part - part))


# %% right: it calls itself: an all-reduce is a reduce-scatter and an all-gather
def bytes_sent(op, nbytes, ranks):
    if op == 'all_reduce':
        return bytes_sent('reduce_scatter', nbytes, ranks) + bytes_sent('all_gather', nbytes, ranks)
    if op == 'all_to_all':
        return (bytes_sent('all_to_all', nbytes * (ranks - 1) / ranks, ranks - 1) + nbytes * (ranks - 1) / ranks
                if ranks > 1 else 0)
    return nbytes - nbytes / ranks


# %% right: every part of every rank is followed to the rank that it is for
def bytes_sent(op, nbytes, ranks):
    def forwarded(by):
        times = 0
        for origin in range(ranks):
            for goal in range(ranks):
                at = origin
                while at != goal:
                    times += at == by
                    at = (at + 1) % ranks
        return times
    if op == 'all_to_all':
        return forwarded(0) * nbytes / ranks
    return (2 if op == 'all_reduce' else 1) * sum(nbytes / ranks for _ in range(1, ranks))
