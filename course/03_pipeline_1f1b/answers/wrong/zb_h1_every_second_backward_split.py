# told: every backward is to be split
def zb_h1(rank, p, m):
    warmup = min(m, p - rank - 1)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m):
        todo += [f"F{warmup + i}"] * (warmup + i < m) + [f"B{i}"]
        todo += [f"W{i - rank}"] * (i >= rank and (i - rank) % 2 == 0)
    return todo + [f"W{i}" for i in range(max(0, m - rank), m) if i % 2 == 0]
