from labkit.answers import Edit

_EACH, _BUBBLE = "(many[1] - few[1]) / (many[0] - few[0])", "(p - 1) / v * each"

WRONG = [
    Edit(_EACH, "many[1] / many[0]", mistake="each: this shares out the whole step, with the bubble and what comes once. Those are in both runs: take the difference."),
    Edit(_EACH, "few[1] / few[0]", mistake="each: this shares out the whole step, with the bubble and what comes once. Those are in both runs: take the difference."),
    Edit(_BUBBLE, "(p - 1) * each", mistake="bubble: with v chunks a pass that is waited for is one v-th as long."),
    Edit(_BUBBLE, "p / v * each", mistake="bubble: it is p - 1 passes of a chunk, not p."),
    Edit(_BUBBLE, "(p - 1) / (v * few[0]) * each", mistake="bubble: that is its share of the work. Asked are its seconds, which do not depend on the microbatches."),
    Edit(" - bubble", "", mistake="once: the bubble is in it. It belongs to the pipeline, and not to the gradients or the optimizer."),
    Edit("few[1] - few[0] * each", "many[1] - few[0] * each", mistake="once: seconds of one run, and microbatches of the other."),
    Edit("m * each + bubble + once", "m * each", mistake="step: the bubble and what comes once are in every step."),
    Edit("m * each + bubble + once", "m * each + once", mistake="step: the bubble is in every step, too."),
    Edit("m * each + bubble + once", "m / few[0] * few[1]", mistake="step: only what belongs to microbatches grows with their number."),
    Edit("m * each + bubble + once", "m / many[0] * many[1]", mistake="step: only what belongs to microbatches grows with their number."),
]

RIGHT = [
    Edit("m * each + bubble + once", "many[1] + (m - many[0]) * each"),
]


# %% right: a line through two points
import numpy as np


def two_runs(p, v, few, many, m):
    (m1, t1), (m2, t2) = few, many
    slope, at_0 = np.linalg.solve([[m1, 1], [m2, 1]], [t1, t2])
    bubble = slope * (p - 1) / v
    return {"step": slope * m + at_0, "each": slope, "bubble": bubble, "once": at_0 - bubble}


# %% right: fractions
from fractions import Fraction


def two_runs(p, v, few, many, m):
    (m1, t1), (m2, t2) = few, many
    each = (Fraction(t1) - Fraction(t2)) / (m1 - m2)
    idle = each * Fraction(p - 1, v)
    once = Fraction(t2) - each * m2 - idle
    return {"each": float(each), "bubble": float(idle), "once": float(once), "step": float(each * m + idle + once)}
