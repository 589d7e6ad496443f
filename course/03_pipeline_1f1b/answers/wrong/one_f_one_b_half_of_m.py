# told: activations at a time | are enough
def one_f_one_b(rank, p, m):
    warmup = min(m, max(p - rank - 1, m // 4))
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m - warmup):
        todo += [f"F{warmup + i}", f"B{i}"]
    return todo + [f"B{i}" for i in range(m - warmup, m)]
