from labkit.answers import Edit

WRONG = [
    Edit("(2 * all_gather if sequence_parallel else 0)", "0", told="Two all-gathers are missing"),
    Edit("= s * b * h * element_size", "= 0.5 * s * b * h * element_size", told="two column-row pairs"),
    Edit(
        "return forward + backward + (2 * all_gather if sequence_parallel else 0)",
        "return forward",
        told="backward pass has as many arrows",
    ),
    Edit(" * (t - 1) / t", "", told="t-1 of t parts"),
]


# %% right: exact fractions, by kind of collective
from fractions import Fraction
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    ring = Fraction(t - 1, t) * s * b * h * element_size
    sums = 2 * (2 + 2) * ring
    return float(sums + 2 * ring * int(sequence_parallel))


# %% right: step by step of each ring
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    part = s * b * h * element_size / t
    steps = t - 1
    total = 0
    for pair in ('attention', 'mlp'):
        for way in ('forward', 'backward'):
            total += 2 * steps * part
        total += steps * part if sequence_parallel else 0
    return total


# %% right: in fractions
from fractions import Fraction


def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    sent = s * b * h * element_size * (1 - Fraction(1, t))
    return sent * sum([2, 2, 2, 2, 2 * bool(sequence_parallel)])


# %% right: in numpy
import numpy as np


def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    steps = np.ones(10 if sequence_parallel else 8) * (t - 1)
    return steps.sum() * (s * b * h * element_size / t)


# %% right: message by message
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    sent = 0.0
    for _pair in ("attention", "mlp"):
        for _direction in ("forward", "backward"):
            kinds = ["all_gather", "reduce_scatter"] if sequence_parallel else ["all_reduce"]
            kinds += ["all_gather"] * (sequence_parallel and _direction == "backward")
            sent += sum((2 if kind == "all_reduce" else 1) * s * b * h * element_size * (t - 1) / t for kind in kinds)
    return sent


# %% right: messages by their names, counted
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    cost = {"ar": 2, "ag": 1, "rs": 1}
    pair = ["ag", "rs", "ag", "rs", "ag"] if sequence_parallel else ["ar", "ar"]
    return sum(cost[k] * n * (t - 1) / t for k in pair * 2)


# %% wrong: backward twice
# told: twice the products
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    return (12 if not sequence_parallel else 14) * n * (t - 1) / t


# %% wrong: each gather of a part
# told: of one rank's part
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    whole, part = n * (t - 1) / t, n / t * (t - 1) / t
    return 8 * whole + (2 * part if sequence_parallel else 0)


# %% wrong: forward only regather
# told: This is the forward pass
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    return (4 if not sequence_parallel else 6) * n * (t - 1) / t


# %% wrong: mlp 4h
# told: stay on their ranks
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    f = 4 + 16
    return (f if not sequence_parallel else f + 5) * n * (t - 1) / t


# %% wrong: of all ranks
# told: all t ranks send
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    return (8 if not sequence_parallel else 10) * n * (t - 1)


# %% wrong: one gather more
# told: two column layers
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    payload = s * b * h * element_size * (t - 1) / t
    return (9 if sequence_parallel else 8) * payload


# %% wrong: one sequence
# told: one sequence
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    return (10 if sequence_parallel else 8) * s * h * element_size * (t - 1) / t


# %% wrong: regather in both
# told: nothing is gathered again
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    return 10 * n * (t - 1) / t


# %% wrong: rounded down
# told: Nothing is rounded
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    return (10 if sequence_parallel else 8) * (s * b * h * element_size // t) * (t - 1)


# %% wrong: sp halves
# told: does not send less
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    return (8 if not sequence_parallel else 4) * n * (t - 1) / t


# %% wrong: two bytes an element
# told: whatever `element_size` says
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    return (10 if sequence_parallel else 8) * s * b * h * 2 * (t - 1) / t
