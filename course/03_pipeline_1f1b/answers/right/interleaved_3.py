# NumPy: the table as an array, transposed; a tuple
import numpy
def interleaved(rank, p, m, v):
    i = numpy.arange(m).reshape(-1, 1, p).repeat(v, axis=1).ravel()
    c = numpy.tile(numpy.arange(v).repeat(p), m // p)
    w = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
    words = []
    for k in range(m * v + w):
        words += [f"F{i[k]}.{c[k]}"] if k < m * v else []
        words += [f"B{i[k - w]}.{v - 1 - c[k - w]}"] if k >= w else []
    return tuple(words)
