# a NumPy number, summed over the steps
import numpy
def bytes_sent(op, nbytes, ranks):
    return numpy.full((1 + (op == "all_reduce")) * (ranks - 1), nbytes / ranks).sum()
