from fractions import Fraction
def bytes_sent(op, nbytes, ranks):
    share = Fraction(nbytes, ranks) * (ranks - 1)
    return share + share if op == "all_reduce" else share
