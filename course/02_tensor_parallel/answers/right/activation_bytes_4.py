# row by row of the table, in numpy
import numpy as np


def activation_bytes(s, b, h, a, t, sequence_parallel):
    rows = np.array([2, 2, 4, 2, 5 * a * s / h, 2, 1, 2, 2, 8, 8, 1]) * s * b * h
    cut = np.array([0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0], dtype=bool)
    cut |= bool(sequence_parallel)
    return np.where(cut, rows / t, rows).sum()
