# what is left of W at the end comes from the last to the first
def zb_h1(rank, p, m):
    warmup = min(m, p - rank - 1)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m):
        todo += [f"F{warmup + i}"] * (warmup + i < m) + [f"B{i}"] + [f"W{i - rank}"] * (i >= rank)
    return todo + [f"W{i}" for i in reversed(range(max(0, m - rank), m))]
