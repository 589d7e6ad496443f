from labkit.answers import Edit

WRONG = [
    Edit("(v * m)", "m", told="steps of a v-th"),
    Edit("(p - 1)", "p", told="p-1 steps from the last"),
    Edit("(p - 1) / (v * m)", "round((p - 1) / (v * m), 3)", told="Close: this is rounded"),
    Edit("(p - 1) / (v * m)", "100 * (p - 1) / (v * m)", told="in percent"),
    Edit("(p - 1) / (v * m)", "(p - 1) / (v * v * m)", told="v is counted twice"),
    Edit("(p - 1) / (v * m)", "0.5", told="the same number for every pipeline"),
    Edit("p: int, m: int, v: int", "ranks: int, m: int, v: int", ("(p - 1)", "(ranks - 1)"), told="calls by name"),
    Edit("def bubble(", "def bubbles(", told="defines `bubbles`"),
]


# %% right: idle hops of length 1/v over m
def bubble(p, m, v):
    hop = 1 / v
    return (p - 1) * hop / m


# %% right: exact fractions, with backwards twice as long
from fractions import Fraction
def bubble(p, m, v):
    return float(Fraction(3 * (p - 1), v) / (3 * m))


# %% right: the whole time over the work, less one
def bubble(p, m, v):
    return (m * v + p - 1) / (m * v) - 1


# %% right: a Fraction
from fractions import Fraction
def bubble(p, m, v):
    return Fraction(p - 1, m * v)


# %% right: NumPy numbers
import numpy
def bubble(p, m, v):
    return numpy.float64(p - 1) / numpy.int64(m) / v


# %% right: a Decimal would be rounded: a torch number, counted on the package's own simulator
import torch
def bubble(p, m, v):
    from minimegatron.parallel.pipeline.actions import schedule_from_text
    from minimegatron.parallel.pipeline.schedule_sim import simulate
    rows = [" ".join(f"F{i}" for i in range(m)) + " " + " ".join(f"B{i}" for i in range(m))] * p
    takes = simulate(schedule_from_text("x", rows)).makespan
    return torch.tensor((float(takes) - 3 * m) / (3 * m) / v, dtype=torch.float64)


# %% wrong: chunks multiply
# told: takes v times as long
def bubble(p, m, v):
    return v * (p - 1) / m


# %% wrong: idle steps
# told: idle steps alone
def bubble(p, m, v):
    total = 3 * (m + (p - 1) / v)
    return total - 3 * m


# %% wrong: microbatches in groups of p
# told: 1/v as long
def bubble(p, m, v):
    return (p - 1) / (m // p * p * v)


# %% wrong: one microbatch has none
# told: wrong; the inputs and answers of this case stay hidden
def bubble(p, m, v):
    return (p - 1) / (m * v) if m > 1 else 0.0


# %% wrong: one step a hop
# told: a backward takes 2
def bubble(p, m, v):
    steps_of_waiting = p - 1
    return steps_of_waiting / (3 * m * v)


# %% wrong: share of whole time
# told: share of the whole time
def bubble(p, m, v):
    b = (p - 1) / (v * m)
    return b / (1 + b)


# %% wrong: share of whole time without v
# told: idle time over *work*
def bubble(p, m, v):
    return (p - 1) / (m + p - 1)


# %% wrong: stages in place of ranks
# told: the last *rank*
def bubble(p, m, v):
    stages = p * v
    return (stages - 1) / (m * v)


# %% wrong: two chunks at most
# told: 1/v as long
def bubble(p, m, v):
    return (p - 1) / m / (2 if v > 1 else 1)


# %% wrong: whole numbers
# told: lose the remainder
def bubble(p, m, v):
    return (p - 1) // v / m


# %% wrong: with the warm up of interleaving
# told: count each hop twice
def bubble(p, m, v):
    return (p - 1) / m if v == 1 else 2 * (p - 1) / (m * v)
