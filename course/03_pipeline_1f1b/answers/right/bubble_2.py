# exact fractions, with backwards twice as long
from fractions import Fraction
def bubble(p, m, v):
    return float(Fraction(3 * (p - 1), v) / (3 * m))
