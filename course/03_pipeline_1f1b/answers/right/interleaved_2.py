# a generator over slots
def interleaved(rank, p, m, v):
    n = m * v
    def slot(k):
        group, rest = divmod(k, p * v)
        return group * p + rest % p, rest // p
    ahead = min(n, 2 * (p - 1 - rank) + p * (v - 1))
    for k in range(n + ahead):
        if k < n:
            i, c = slot(k)
            yield f"F{i}.{c}"
        if k >= ahead:
            i, c = slot(k - ahead)
            yield f"B{i}.{v - 1 - c}"
