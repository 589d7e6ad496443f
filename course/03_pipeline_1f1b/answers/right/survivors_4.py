# a NumPy array of indices, by least squares in NumPy
import numpy
def survivors(got, grads):
    a = numpy.stack([g.numpy().ravel() for g in grads], axis=1).astype("float64")
    w, *_ = numpy.linalg.lstsq(a, got.numpy().ravel().astype("float64"), rcond=None)
    return numpy.flatnonzero(w > 0.5)
