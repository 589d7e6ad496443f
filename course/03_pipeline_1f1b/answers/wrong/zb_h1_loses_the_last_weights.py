# told: is to be split
def zb_h1(rank, p, m):
    todo = []
    for step in range(m + p - rank - 1):
        f, b, w = step, step - (p - rank - 1), step - (p - 1)
        todo += [f"{k}{i}" for k, i in zip("FBW", (f, b, w)) if 0 <= i < m]
    return todo
