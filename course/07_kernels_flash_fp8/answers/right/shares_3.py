# the pseudo-inverse, in NumPy
import numpy as np
def shares(outs, parts):
    A = np.stack([p.numpy().ravel() for p in parts], 1)
    return [[float(c) for c in np.linalg.pinv(A) @ o.numpy().ravel()] for o in outs]
