# told: another order than rank
def gpipe(rank, p, m):
    order = list(range(m))
    if rank % 2:
        order[:2] = order[:2][::-1]
    return [f"F{i}" for i in order] + [f"B{i}" for i in order]
