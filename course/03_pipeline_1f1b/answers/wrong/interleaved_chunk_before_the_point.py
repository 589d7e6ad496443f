# told: the chunk comes before the point
def interleaved(rank, p, m, v):
    table = [(g + i, c) for g in range(0, m, p) for c in range(v) for i in range(p)]
    forward = [f"F{c}.{i}" for i, c in table]
    backward = [f"B{v - 1 - c}.{i}" for i, c in table]
    ahead = min(len(table), 2 * (p - rank - 1) + (v - 1) * p)
    todo = forward[:ahead]
    for k in range(len(table) - ahead):
        todo += [forward[ahead + k], backward[k]]
    return todo + backward[len(table) - ahead :]
