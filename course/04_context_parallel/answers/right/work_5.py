# a numpy array
import numpy as np


def work(s, cp, zigzag):
    chunks = (np.arange(s) + 1).reshape(2 * cp if zigzag else cp, -1).sum(1)
    return chunks[:cp] + chunks[cp:][::-1] if zigzag else chunks
