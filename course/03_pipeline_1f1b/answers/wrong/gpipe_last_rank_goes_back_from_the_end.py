# told: another order than rank
def gpipe(rank, p, m):
    back = range(m) if rank < p - 1 else reversed(range(m))
    return [f"F{i}" for i in range(m)] + [f"B{i}" for i in back]
