# by parts, each named
from collections import OrderedDict
from fractions import Fraction


def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    away = Fraction(ep - 1, ep) * k * tokens
    there, weights, back = away * h * element_size, away * 4, away * h * element_size
    gather = (ep - 1) * tokens * h * element_size
    routing = (ep - 1) * tokens * experts * 4 + (ep - 1) * tokens * experts
    scatter = (ep - 1) * tokens * h * element_size
    return OrderedDict(allgather=gather + routing + scatter, alltoall=float(there + weights + back))
