# counting what is under way
def one_f_one_b(rank, p, m):
    todo, f, b = [], 0, 0
    while b < m:
        if f < m and f - b < p - rank:
            todo.append(f'F{f}')
            f += 1
        else:
            todo.append(f'B{b}')
            b += 1
    return todo
