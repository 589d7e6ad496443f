# a numpy array
import numpy as np


def positions(s, cp, rank):
    chunks = np.array_split(np.arange(s), 2 * cp)
    return np.concatenate((chunks[rank], chunks[-1 - rank]))
