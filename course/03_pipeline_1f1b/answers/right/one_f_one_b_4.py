# a generator
def one_f_one_b(rank, p, m):
    ahead = p - 1 - rank
    for k in range(m + ahead):
        if k < m:
            yield f"F{k}"
        if k >= ahead:
            yield f"B{k - ahead}"
