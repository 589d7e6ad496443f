# exact fractions, by kind of collective
from fractions import Fraction
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    ring = Fraction(t - 1, t) * s * b * h * element_size
    sums = 2 * (2 + 2) * ring
    return float(sums + 2 * ring * int(sequence_parallel))
