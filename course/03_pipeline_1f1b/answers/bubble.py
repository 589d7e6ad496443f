from labkit.answers import Edit

_ALL = "(p - 1) / (v * m)"

WRONG = [
    Edit(_ALL, "(p - 1) / (v * m + p - 1)", mistake="This is the share of the whole time. Asked is idle time over *work*: divide by the work alone."),
    Edit(_ALL, "3 * (p - 1) / v", mistake="These are the idle steps alone. Asked is idle time over work."),
    Edit(_ALL, "(p - 1) / m", mistake="With chunks the bubble is too large here: filling and draining take steps of a v-th."),
    Edit(_ALL, "v * (p - 1) / m", mistake="Chunks make the bubble larger here: a hop takes v times as long."),
    Edit(_ALL, "(p * v - 1) / (v * m)", mistake="With chunks the pipeline has more stages, but it fills when the first microbatch has reached the last *rank*."),
    Edit(_ALL, "p / (v * m)", mistake="The first rank is p-1 steps from the last, not p."),
    Edit(_ALL, "(p - 1) / (3 * v * m)", mistake="You count 1 step of waiting a hop: a forward is 1, but a backward takes 2, and the pipeline drains over as many hops as it fills."),
    Edit(_ALL, f"100 * {_ALL}", mistake="That is the bubble in percent. Asked is the fraction itself."),
    Edit(_ALL, f"round({_ALL}, 3)"),
    Edit(_ALL, "(p - 1) // v / m"),
    Edit(_ALL, "(p - 1) / (v * v * m)", mistake="v counts twice here. A hop takes a v-th of the time, and there are p-1 of them, as before."),
    Edit(_ALL, "0.5"),
    Edit(_ALL, f"{_ALL} if m > 1 else 0.0", told="wrong; the inputs and answers of this case stay hidden"),
    Edit("p: int, m: int, v: int", "ranks: int, m: int, v: int", ("(p - 1)", "(ranks - 1)"), told="calls by name"),
    Edit("def bubble(", "def bubbles(", told="defines `bubbles`"),
]

RIGHT = [
    Edit(_ALL, "(p - 1) * (1 / v) / m"),
]


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
