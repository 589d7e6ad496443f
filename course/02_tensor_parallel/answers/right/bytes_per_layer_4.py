# in fractions
from fractions import Fraction


def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    sent = s * b * h * element_size * (1 - Fraction(1, t))
    return sent * sum([2, 2, 2, 2, 2 * bool(sequence_parallel)])
