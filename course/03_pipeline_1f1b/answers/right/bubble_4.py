# a Fraction
from fractions import Fraction
def bubble(p, m, v):
    return Fraction(p - 1, m * v)
