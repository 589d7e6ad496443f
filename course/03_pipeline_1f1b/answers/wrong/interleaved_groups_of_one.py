# told: the groups are too small
def interleaved(rank, p, m, v):
    """A microbatch passes all chunks, then the next one."""
    table = [(i, c) for i in range(m) for c in range(v)]
    forward = [f"F{i}.{c}" for i, c in table]
    backward = [f"B{i}.{v - 1 - c}" for i, c in table]
    ahead = min(len(table), 2 * (p - rank - 1) + (v - 1) * p)
    todo = forward[:ahead]
    for k in range(len(table) - ahead):
        todo += [forward[ahead + k], backward[k]]
    return todo + backward[len(table) - ahead :]
