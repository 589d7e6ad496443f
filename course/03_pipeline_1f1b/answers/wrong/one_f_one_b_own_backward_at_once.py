# told: while an older one still waits
def one_f_one_b(rank, p, m):
    """After the warm-up each microbatch goes back right behind its own forward."""
    warmup = min(m, p - 1 - rank)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(warmup, m):
        todo += [f"F{i}", f"B{i}"]
    return todo + [f"B{i}" for i in range(warmup)]
