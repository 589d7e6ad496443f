# NumPy numbers
import numpy
def bubble(p, m, v):
    return numpy.float64(p - 1) / numpy.int64(m) / v
