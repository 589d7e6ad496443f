# exact fractions; what all ranks hold, less a rank's own part
from fractions import Fraction
def bytes_sent(op, nbytes, ranks):
    part = Fraction(nbytes, ranks)
    return float({'all_reduce': 2}.get(op, 1) * (ranks * part - part))
