# told: activations at a time | are enough
def interleaved(rank, p, m, v):
    table = [(i, c) for first in range(0, m, p) for c in range(v) for i in range(first, first + p)]
    return [f"F{i}.{c}" for i, c in table] + [f"B{i}.{v - 1 - c}" for i, c in table]
