from labkit.answers import Edit

_MAX = "max(gather * flops / (2 * parameters), (gather + sums) * flops / (4 * parameters))"

WRONG = [
    Edit(_MAX, "gather * flops / (2 * parameters)", mistake="That is the forward pass alone. While a layer goes backward, two messages travel."),
    Edit(_MAX, "(gather + sums) * flops / (4 * parameters)", mistake="That is the backward pass alone. With other bytes the forward pass needs more tokens."),
    Edit(_MAX, "max(gather * flops / (2 * parameters), sums * flops / (4 * parameters))", mistake="Backward the gradients do not travel alone: the next weights are gathered, too."),
    Edit(_MAX, "(2 * gather + sums) * flops / (6 * parameters)", mistake="What is short in one pass is not hidden by the other: each pass needs enough tokens of its own."),
    Edit("4 * parameters)", "2 * parameters)", mistake="The backward pass computes twice as much as the forward pass: 4 operations a parameter and token."),
    Edit("(ranks - 1) * (latency + weight * part", "latency + (ranks - 1) * (weight * part", ("(ranks - 1) * (latency + gradient * part", "latency + (ranks - 1) * (gradient * part"), mistake="Each of the D-1 steps of the ring has its latency."),
    Edit("latency + ", "", mistake="The latency is missing: each step of the ring takes it."),
    Edit("(ranks - 1) * (latency", "ranks * (latency", mistake="A ring has D-1 steps: nobody sends itself its own part."),
    Edit("4 * parameters)", "6 * parameters)", mistake="6 operations are those of both passes. The backward pass alone computes 4 a parameter and token."),
    Edit("(2 * parameters)", "(2 * part)", ("(4 * parameters)", "(4 * part)"), mistake="A rank computes its tokens with all parameters of the layer, not with its part of them."),
    Edit(f"return {_MAX}", f"return float(__import__('math').ceil({_MAX}))", mistake="You round. The number need not be whole."),
    Edit("part = parameters / ranks", "part = parameters", mistake="A step of the ring carries 1/D of the layer, not all of it."),
]

RIGHT = [
    Edit(_MAX, "flops / parameters * max(gather / 2, (gather + sums) / 4)"),
    Edit("part = parameters / ranks", "part, ranks = parameters / ranks, int(ranks)"),
]


# %% right: exact fractions, time by time
from fractions import Fraction


def tokens_to_hide(parameters, ranks, flops, bandwidth, latency, weight=2, gradient=4):
    P, D, F, B, a = (Fraction(v) for v in (parameters, ranks, flops, bandwidth, latency))
    ring = lambda each: (D - 1) * a + (D - 1) / D * each * P / B
    return float(max(ring(weight) / (2 * P / F), (ring(weight) + ring(gradient)) / (4 * P / F)))
