# told: before its own F
def interleaved(rank, p, m, v):
    table = [(i, c) for first in range(0, m, p) for c in range(v) for i in range(first, first + p)]
    back = table[::-1]
    n = min(len(table), 2 * (p - rank - 1) + (v - 1) * p)
    todo = [f"F{i}.{c}" for i, c in table[:n]]
    for (fi, fc), (bi, bc) in zip(table[n:], back):
        todo += [f"F{fi}.{fc}", f"B{bi}.{bc}"]
    return todo + [f"B{i}.{c}" for i, c in back[len(table) - n :]]
