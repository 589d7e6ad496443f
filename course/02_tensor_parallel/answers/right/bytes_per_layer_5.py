# in numpy
import numpy as np


def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    steps = np.ones(10 if sequence_parallel else 8) * (t - 1)
    return steps.sum() * (s * b * h * element_size / t)
