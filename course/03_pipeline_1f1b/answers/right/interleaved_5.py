# by the number of the slot, without a table
def interleaved(rank, p, m, v):
    def slot(k):
        group, rest = divmod(k, p * v)
        chunk, i = divmod(rest, p)
        return group * p + i, chunk

    def word(kind, k):
        i, chunk = slot(k)
        return f"{kind}{i}.{chunk if kind == 'F' else v - 1 - chunk}"

    n, ahead = m * v, 2 * (p - 1 - rank) + (v - 1) * p
    steps = [(kind, k if kind == "F" else k - ahead) for k in range(n + ahead) for kind in "FB"]
    return [word(kind, k) for kind, k in steps if 0 <= k < n]
