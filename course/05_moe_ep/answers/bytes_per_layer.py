from labkit.answers import Edit

WRONG = [
    Edit("(row + 4 + row)", "(row + 4)", mistake="All-to-all: what the experts make of the rows travels back, too."),
    Edit("(row + 4 + row)", "(row + row)", mistake="All-to-all: each row takes its weight along, 4 bytes."),
    Edit("(ep - 1) / ep * k", "k", mistake="All-to-all: of P rows one is for an expert of this very rank, and stays."),
    Edit("ep * k * tokens", "ep * tokens", mistake="All-to-all: a token is a row for each of its k experts."),
    Edit("5 * experts + row", "5 * experts", mistake="All-gather: the partial sums come back by a reduce-scatter, as many bytes as the tokens " "themselves."),
    Edit("(ep - 1) * tokens", "ep * tokens", mistake="All-gather: a rank sends its tokens to the P-1 *others*."),
    Edit("row + 5 * experts + row", "row + row", mistake="All-gather: with each token go E weights of 4 bytes and E flags of one."),
    Edit("5 * experts + row", "4 * experts + row", mistake="All-gather: with each token go E weights of 4 bytes and E flags of one."),
    Edit("5 * experts + row", "5 * k + row", told="E weights of 4 bytes"),
    Edit("(row + 4 + row)", "(row + 8 + row)", mistake="All-to-all: the weights go there; nobody needs them back."),
    Edit("h * element_size", "h * 2"),
    Edit("k * tokens *", "2 * tokens *"),
    Edit("5 * experts", "5 * 8"),
    Edit("(ep - 1) * tokens", "3 * tokens"),
    Edit("(ep - 1) * tokens * (row + 5 * experts + row)", "(ep - 1) * tokens * (row + 5 * experts + ep * row)"),
    Edit("(ep - 1) / ep * k", "(ep - 1) / experts * k"),
]

RIGHT = [
    Edit("(ep - 1) / ep * k * tokens", "k * (tokens - tokens / ep)"),
]


# %% right: there and back apart
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    rows, others = k * tokens / ep, ep - 1
    there, back = rows * (h * element_size + 4), rows * h * element_size
    return dict(alltoall=others * (there + back), allgather=others * (tokens * (h * element_size + experts * 5) + tokens * h * element_size))


# %% right: summed over the other ranks
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    a = sum(k * tokens / ep * (2 * h * element_size + 4) for r in range(1, ep))
    g = sum(tokens * (2 * h * element_size + 4 * experts + experts) for r in range(1, ep))
    return {'alltoall': a, 'allgather': g}


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


# %% right: added up over the other ranks
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    a2a = ag = 0.0
    for other in range(1, ep):
        rows = k * tokens / ep
        a2a += rows * (h * element_size + 4)  # there
        a2a += rows * h * element_size  # results that I send back
        ag += tokens * h * element_size + tokens * experts * 4 + tokens * experts
        ag += tokens * h * element_size
    return {"alltoall": a2a, "allgather": ag}


# %% wrong: one message for all
# mistake: All-gather: each of the P-1 other ranks gets a message of its own. Each of them counts.
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    row = h * element_size
    leaving = k * tokens * (ep - 1) / ep
    return {"alltoall": leaving * (2 * row + 4), "allgather": tokens * (row + 5 * experts) + (ep - 1) * tokens * row}


# %% wrong: only its own expert stays
# mistake: All-to-all: what stays goes to this *rank*, which holds E/P experts and not one.
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    row = h * element_size
    leaving = k * tokens * (experts - 1) / experts
    return {"alltoall": leaving * (2 * row + 4), "allgather": (ep - 1) * tokens * (2 * row + 5 * experts)}


# %% wrong: routing travels back
# mistake: All-gather: weights and flags go there. What comes back is [P T, h] alone.
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    row = h * element_size
    leaving = k * tokens * (ep - 1) / ep
    return {"alltoall": leaving * (2 * row + 4), "allgather": 2 * (ep - 1) * tokens * (row + 5 * experts)}


# %% wrong: weights like elements
# mistake: A weight has 4 bytes, whatever the size of an element of a row.
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    row = h * element_size
    leaving = k * tokens * (ep - 1) / ep
    return {"alltoall": leaving * (2 * row + element_size), "allgather": (ep - 1) * tokens * (2 * row + experts * (element_size + 1))}
# %% wrong: sent and received
# what a rank gets is counted beside what it sends
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    row = h * element_size
    return {
        "alltoall": 2 * (ep - 1) / ep * k * tokens * (2 * row + 4),
        "allgather": 2 * (ep - 1) * tokens * (2 * row + 5 * experts),
    }


