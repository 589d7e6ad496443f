from labkit.answers import Edit

_SUM = "sum(1 - (-2 * one // period) for one in latency[rank:])"

WRONG = [
    Edit(_SUM, "-(-((len(latency) - rank) * period + 2 * sum(latency[rank:])) // period)", mistake="This fills the round trip from this rank to the last one and back, as if an F or a B could begin at any moment. They take turns."),
    Edit(_SUM, "len(latency) - rank + -(-2 * sum(latency[rank:]) // period) + 1", told="it would take no longer"),
    Edit(_SUM, "len(latency) - rank", mistake="This is the warm-up for free messages."),
    Edit(_SUM, "2 * (len(latency) - rank)", mistake="Factor 2, whatever the latency: more than free messages need, and too little for slow ones."),
    Edit("-2 * one", "-one", mistake="A border is crossed by two messages: the activation there, the gradient back."),
    Edit("1 - (-2 * one // period)", "1 + 2 * one // period", mistake="This is rounded down: the part of F + B that is left over is waited for with each microbatch."),
    Edit("1 - (-2 * one // period)", "1 - 2 * (-one // period)", mistake="The two messages over a border are rounded up one by one here. Only there and back together is what a rank waits for."),
    Edit("latency[rank:]", "latency[:rank]", mistake="These are the borders between rank 0 and this rank. Its gradients come from the other side."),
    Edit("latency[rank:]", "latency[:len(latency) - rank]", mistake="So many borders are right, but these are the first of the pipeline; `latency[r]` is between ranks r and r+1."),
    Edit("latency[rank:]", "latency[rank + 1:]", mistake="The border from this rank to the next one is left out."),
    Edit("latency[rank:]", "[max(latency)] * (len(latency) - rank)", mistake="All borders are taken for as slow as the slowest."),
    Edit("latency[rank:]", "[max(latency[rank:], default=0)] * (len(latency) - rank)", told="it would take no longer"),
    Edit("period = forward + backward", "period = forward", mistake="In the steady state a rank does an F *and* a B for each microbatch."),
    Edit("period = forward + backward", "period = backward", mistake="In the steady state a rank does an F *and* a B for each microbatch."),
    Edit(_SUM, f"{_SUM} + 1", mistake="Before the first B an F follows the warm-up; so one more activation is kept than the warm-up counts."),
    Edit(_SUM, "10 ** 6", mistake="All forwards come first here: this is GPipe."),
    Edit(_SUM, "rank", told="deadlock"),
    Edit(_SUM, "max(0, len(latency) - rank - 1)", told="keep each other waiting"),
    Edit(_SUM, "sum(latency[rank:]) / period", told="is no number of forwards"),
    Edit(_SUM, "[1 - (-2 * one // period) for one in latency[rank:]]", told="is no number of forwards"),
]

RIGHT = [
    Edit(_SUM, "sum(2 + (2 * one - 1) // period for one in latency[rank:])"),
]

EQUIVALENT = []


# %% right: from the last rank on, one border after the other
import math
def warm_up(rank, forward, backward, latency):
    if rank == len(latency):
        return 0
    there_and_back = forward + latency[rank] + backward + latency[rank]
    return warm_up(rank + 1, forward, backward, latency) + math.ceil(there_and_back / (forward + backward))


# %% right: a search, border by border, with two ranks that play their lists
def warm_up(rank, forward, backward, latency):
    def steps(ahead, late, m=64):
        f, b, mine, theirs = [0] * m, [0] * m, 0, 0
        for i in range(m + ahead):
            if i < m:
                mine = f[i] = mine + forward
            if i >= ahead:
                k = i - ahead
                theirs = max(theirs, f[k] + late) + forward + backward
                mine = b[k] = max(mine, theirs + late) + backward
        return mine

    if rank >= len(latency):
        return 0
    late, ahead = latency[rank], 1
    while steps(ahead, late) > steps(64, late):
        ahead += 1
    return ahead + warm_up(rank + 1, forward, backward, latency)


# %% right: exact fractions, a float in the end
from fractions import Fraction
from math import ceil
def warm_up(rank, forward, backward, latency):
    turn = Fraction(forward + backward)
    return float(sum(ceil((turn + 2 * latency[r]) / turn) for r in range(rank, len(latency))))


# %% right: NumPy
import numpy
def warm_up(rank, forward, backward, latency):
    late = 2 * numpy.asarray(latency[rank:], dtype=int)
    return int((numpy.ceil(late / (forward + backward)) + 1).sum())
