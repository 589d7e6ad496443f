# numpy, as a mask
import numpy as np


def work(s, cp, zigzag):
    chunks = np.arange(s).reshape(cp + cp * zigzag, -1)
    mine = [(r, 2 * cp - 1 - r) if zigzag else (r,) for r in range(cp)]
    return [(chunks[list(two)] + 1).sum() for two in mine]
