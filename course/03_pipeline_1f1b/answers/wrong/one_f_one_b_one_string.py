# told: returns one string
def one_f_one_b(rank, p, m):
    warmup = min(m, p - rank - 1)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m - warmup):
        todo += [f"F{warmup + i}", f"B{i}"]
    return " ".join(todo + [f"B{i}" for i in range(m - warmup, m)])
