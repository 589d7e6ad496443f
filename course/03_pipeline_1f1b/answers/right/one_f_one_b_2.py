# warm-up of one forward more, and then B before F
def one_f_one_b(rank, p, m):
    w = min(m, p - rank)
    todo = [f'F{i}' for i in range(w)]
    for i in range(m):
        todo += [f'B{i}'] + [f'F{w + i}'] * (w + i < m)
    return todo
