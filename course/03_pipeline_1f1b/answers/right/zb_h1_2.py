# by time step: what falls on this one
def zb_h1(rank, p, m):
    todo = []
    for step in range(m + p):
        f, b = step, step - (p - rank - 1)
        w = b - rank
        todo += [f'{k}{i}' for k, i in (('F', f), ('B', b), ('W', w)) if 0 <= i < m]
    return todo
