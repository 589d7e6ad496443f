# told: waits for the | deadlock | are enough | before its own
def interleaved(rank, p, m, v):
    table = [(i, c) for i in range(m) for c in range(v)]
    back = [(i, v - 1 - c) for i, c in table]
    n = min(len(table), 2 * (p - rank - 1) + (v - 1) * p)
    todo = [f"F{i}.{c}" for i, c in table[:n]]
    for (fi, fc), (bi, bc) in zip(table[n:], back):
        todo += [f"F{fi}.{fc}", f"B{bi}.{bc}"]
    return todo + [f"B{i}.{c}" for i, c in back[len(table) - n :]]
