# told: messages take time | are enough | before its own
def interleaved(rank, p, m, v):
    table = [(i, c) for first in range(0, m, p) for c in range(v) for i in range(first, first + p)]
    forward = [f"F{i}.{c}" for i, c in table]
    backward = [f"B{i}.{v - 1 - c}" for i, c in table]
    warmup = min(len(table), max(0, 2 * (p - rank - 1) + (v - 1) * p - 1))
    todo = forward[:warmup]
    for f, b in zip(forward[warmup:], backward):
        todo += [f, b]
    return todo + backward[len(table) - warmup :]
