from labkit.answers import Edit

WRONG = [
    Edit("(v * m)", "m", mistake="With v chunks a rank, filling and draining take steps of a v-th."),
    Edit("(p - 1)", "p", mistake="The first rank is p-1 steps from the last, not p."),
    Edit("(p - 1) / (v * m)", "round((p - 1) / (v * m), 3)", mistake="Close: this is rounded. Return the number as it is."),
    Edit("(p - 1) / (v * m)", "100 * (p - 1) / (v * m)", mistake="That is the bubble in percent. Asked is the fraction itself."),
    Edit("(p - 1) / (v * m)", "(p - 1) / (v * v * m)", mistake="v is counted twice here: a hop takes 1/v as long, once."),
    Edit("(p - 1) / (v * m)", "0.5", mistake="This is the same number for every pipeline."),
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
# mistake: Chunks make the bubble larger here: a hop takes v times as long.
def bubble(p, m, v):
    return v * (p - 1) / m


# %% wrong: idle steps
# mistake: These are the idle steps alone. Asked is idle time over work.
def bubble(p, m, v):
    total = 3 * (m + (p - 1) / v)
    return total - 3 * m


# %% wrong: one step a hop
# mistake: You count 1 step of waiting a hop: a forward is 1, but a backward takes 2, and the pipeline drains over as many hops as it fills.
def bubble(p, m, v):
    steps_of_waiting = p - 1
    return steps_of_waiting / (3 * m * v)


# %% wrong: share of whole time
# mistake: This is the share of the whole time. Asked is idle time over *work*: divide by the work alone.
def bubble(p, m, v):
    b = (p - 1) / (v * m)
    return b / (1 + b)


# %% wrong: stages in place of ranks
# mistake: With chunks the pipeline has more stages, but it fills when the first microbatch has reached the last *rank*.
def bubble(p, m, v):
    stages = p * v
    return (stages - 1) / (m * v)


# %% wrong: whole numbers
# mistake: You divide whole numbers and lose the remainder: a bubble is a fraction.
def bubble(p, m, v):
    return (p - 1) // v / m


# %% wrong: with the warm up of interleaving
# mistake: With chunks you count each hop twice. The warm-up is longer then, but the pipeline fills over p-1 hops.
def bubble(p, m, v):
    return (p - 1) / m if v == 1 else 2 * (p - 1) / (m * v)
# %% wrong: one microbatch has none
# told: wrong; the inputs and answers of this case stay hidden
def bubble(p, m, v):
    return (p - 1) / (m * v) if m > 1 else 0.0


