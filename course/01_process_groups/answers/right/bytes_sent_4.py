# a Fraction, not rounded to a float
from fractions import Fraction
def bytes_sent(op, nbytes, ranks):
    return Fraction(nbytes * (ranks - 1), ranks) * (2 if op == "all_reduce" else 1)
