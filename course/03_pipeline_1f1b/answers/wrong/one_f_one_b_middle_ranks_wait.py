# told: are enough | waits for the
def one_f_one_b(rank, p, m):
    warmup = min(m, 0 if rank == p - 1 else max(1, (p - rank - 1) // 2 * 2))
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m - warmup):
        todo += [f"F{warmup + i}", f"B{i}"]
    return todo + [f"B{i}" for i in range(m - warmup, m)]
