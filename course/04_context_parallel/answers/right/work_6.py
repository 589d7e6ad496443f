# a running sum over the chunks, and its differences
from itertools import accumulate


def work(s, cp, zigzag):
    chunks = 2 * cp if zigzag else cp
    n = s // chunks
    upto = [c * n * (c * n + 1) // 2 for c in range(chunks + 1)]
    chunk = [b - a for a, b in zip(upto, upto[1:])]
    if zigzag:
        return [early + late for early, late in zip(chunk[:cp], chunk[: cp - 1 : -1])]
    both = list(accumulate(chunk))
    return [both[r] - (both[r - 1] if r else 0) for r in range(cp)]
