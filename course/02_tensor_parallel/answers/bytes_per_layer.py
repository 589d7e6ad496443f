from labkit.answers import Edit

_HALF = "Half of it. A layer has two pairs, each with a sum forward and one backward; an all-reduce sends all twice."
_RETURN = "return forward + backward + (2 * all_gather if sequence_parallel else 0)"

WRONG = [
    Edit("= s * b * h", "= 0.5 * s * b * h", mistake=_HALF),
    Edit(_RETURN, "return forward", mistake=_HALF),
    Edit("(2 * all_gather if sequence_parallel else 0)", "0",
         mistake="You count the arrows alone. The backward pass needs x whole before it can make dW: where does a rank "
                 "get it, and for how many products?"),
    Edit("(2 * all", "(all",
         mistake="One all-gather is missing: a layer has two column layers, and the backward pass gathers the input of "
                 "each."),
    Edit("(2 * all", "(4 * all",
         mistake="Two all-gathers too many: a row layer's input is cut by features, and its dW needs no other rank's."),
    Edit("(2 * all_gather if sequence_parallel else 0)", "2 * all_gather",
         mistake="With tensor parallelism alone nothing is gathered again: every rank keeps x whole."),
    Edit(" * (t - 1) / t", "", mistake="A ring sends t-1 of t parts: one rank alone sends nothing."),
    Edit("(t - 1) / t", "(t - 1)", mistake="This is what all t ranks send together."),
    Edit("s * b * h", "s * h", mistake="You count one sequence: a batch has b of them."),
    Edit(" * element_size", "", mistake="These are elements: a message has element_size bytes for each."),
    Edit("* element_size", "* 2", mistake="You count 2 bytes an element, whatever `element_size` says."),
    Edit("forward + backward", "3 * forward",
         mistake="The backward pass has twice the products of the forward pass, but as many arrows."),
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
