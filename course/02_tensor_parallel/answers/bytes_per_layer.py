from labkit.answers import Edit

WRONG = [
    Edit("(2 * all_gather if sequence_parallel else 0)", "0", mistake="Two all-gathers are missing: x is stored cut, and the backward pass needs it whole for dW, once " "for each pair."),
    Edit("= s * b * h * element_size", "= 0.5 * s * b * h * element_size", mistake="Half of it: a layer has two column-row pairs, attention and MLP."),
    Edit(
        "return forward + backward + (2 * all_gather if sequence_parallel else 0)",
        "return forward",
        mistake="This is the forward pass. The backward pass has as many arrows.",
    ),
    Edit(" * (t - 1) / t", "", mistake="A ring sends t-1 of t parts: one rank alone sends nothing."),
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
# mistake: The backward pass has twice the products of the forward pass, but as many arrows.
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    return (12 if not sequence_parallel else 14) * n * (t - 1) / t


# %% wrong: each gather of a part
# mistake: With sequence parallelism you count a gather of one rank's part. n is the whole tensor that comes of it: s is the whole sequence.
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    whole, part = n * (t - 1) / t, n / t * (t - 1) / t
    return 8 * whole + (2 * part if sequence_parallel else 0)


# %% wrong: mlp 4h
# mistake: The 4h features of the MLP stay on their ranks: every arrow carries h.
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    f = 4 + 16
    return (f if not sequence_parallel else f + 5) * n * (t - 1) / t


# %% wrong: of all ranks
# mistake: This is what all t ranks send together.
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    return (8 if not sequence_parallel else 10) * n * (t - 1)


# %% wrong: one gather more
# mistake: One all-gather is missing: a layer has two column layers, and the backward pass gathers the input of each.
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    payload = s * b * h * element_size * (t - 1) / t
    return (9 if sequence_parallel else 8) * payload


# %% wrong: one sequence
# mistake: You count one sequence: a batch has b of them.
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    return (10 if sequence_parallel else 8) * s * h * element_size * (t - 1) / t


# %% wrong: regather in both
# mistake: With tensor parallelism alone nothing is gathered again: every rank keeps x whole.
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    return 10 * n * (t - 1) / t


# %% wrong: rounded down
# mistake: Nothing is rounded: with // the rest of a division is lost.
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    return (10 if sequence_parallel else 8) * (s * b * h * element_size // t) * (t - 1)


# %% wrong: sp halves
# mistake: Sequence parallelism does not send less: an all-gather and a reduce-scatter together send what one all-reduce does.
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    return (8 if not sequence_parallel else 4) * n * (t - 1) / t


# %% wrong: two bytes an element
# mistake: You count 2 bytes an element, whatever `element_size` says.
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    return (10 if sequence_parallel else 8) * s * b * h * 2 * (t - 1) / t
