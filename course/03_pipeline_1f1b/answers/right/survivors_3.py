# the pseudo-inverse, in NumPy
import numpy
def survivors(got, grads):
    a = numpy.stack([g.numpy().ravel() for g in grads], 1)
    w = numpy.linalg.pinv(a) @ got.numpy().ravel()
    return [i for i in range(len(grads)) if round(float(w[i]))]
