from labkit.answers import Edit

_ALLTOALL = "(ep - 1) / ep * k * tokens * (row + 4 + row)"
_ALLGATHER = "(ep - 1) * tokens * (row + 5 * experts + row)"
_ROUTING = "All-gather: with each token go E weights of 4 bytes and E flags of one."

WRONG = [
    Edit(" * tokens *", " * tokens / ep *", mistake="T is the number of tokens of *one* rank: it is not divided by P."),
    Edit(" * tokens *", " * ep * tokens *", mistake="That is what all P ranks send together."),
    Edit(" * tokens *", " * 2 * tokens *",
         mistake="That is twice as much. Asked is what a rank sends, in the forward pass alone."),
    Edit("(row + 4 + row)", "(row + 4)", mistake="All-to-all: what the experts make of the rows travels back, too."),
    Edit("(row + 4 + row)", "(row + row)", mistake="All-to-all: each row takes its weight along, 4 bytes."),
    Edit("(ep - 1) / ep * k", "k", mistake="All-to-all: of P rows one is for an expert of this very rank, and stays."),
    Edit("ep * k * tokens", "ep * tokens", mistake="All-to-all: a token is a row for each of its k experts."),
    Edit("5 * experts + row", "5 * experts",
         mistake="All-gather: the partial sums come back by a reduce-scatter, as many bytes as the tokens themselves."),
    Edit("(ep - 1) * tokens", "ep * tokens", mistake="All-gather: a rank sends its tokens to the P-1 *others*."),
    Edit("row + 5 * experts + row", "row + row", mistake=_ROUTING),
    Edit("5 * experts + row", "4 * experts + row", mistake=_ROUTING),
    Edit("(row + 4 + row)", "(row + row)", ("row + 5 * experts + row", "row + row"),
         mistake="That is rows and tokens alone. The weights that go along are missing in both ways, and the flags in "
         "the all-gather."),
    Edit("5 * experts + row", "5 * k + row"),
    Edit("(row + 4 + row)", "(row + 8 + row)", mistake="All-to-all: the weights go there, and do not come back."),
    Edit("(row + 4 + row)", "(row + element_size + row)"),
    Edit("(ep - 1) / ep * k", "(experts - 1) / experts * k"),
    Edit(_ALLGATHER, "tokens * (row + 5 * experts) + (ep - 1) * tokens * row"),
    Edit(_ALLGATHER, "2 * (ep - 1) * tokens * (row + 5 * experts)"),
    Edit(_ALLGATHER, "(ep - 1) * tokens * (row + 5 * experts + ep * row)"),
    Edit("h * element_size", "h * 2"),
    Edit("k * tokens *", "2 * tokens *"),
    Edit("5 * experts", "5 * 8"),
]

RIGHT = [Edit("(ep - 1) / ep * k * tokens", "k * (tokens - tokens / ep)")]


# %% right: there and back apart
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    rows, others = k * tokens / ep, ep - 1
    there, back = rows * (h * element_size + 4), rows * h * element_size
    gathered, scattered = tokens * (h * element_size + experts * 5), tokens * h * element_size
    return dict(alltoall=others * (there + back), allgather=others * (gathered + scattered))


# %% right: by parts, each named
from collections import OrderedDict
from fractions import Fraction

def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    away = Fraction(ep - 1, ep) * k * tokens
    there, weights, back = away * h * element_size, away * 4, away * h * element_size
    gather = (ep - 1) * tokens * h * element_size
    routing = (ep - 1) * tokens * experts * 4 + (ep - 1) * tokens * experts
    scatter = (ep - 1) * tokens * h * element_size
    return OrderedDict(allgather=gather + routing + scatter, alltoall=float(there + weights + back))
