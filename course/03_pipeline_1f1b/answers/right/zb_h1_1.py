# keep p activations at most, and do a W whenever one more would not fit
def zb_h1(rank, p, m):
    todo, f, b, w = [], 0, 0, 0
    while w < m:
        if f < m and f - b < p - rank and f - w < p:
            todo.append(f'F{f}'); f += 1
        elif b < f and b - w <= rank and (f == m or f - b >= p - rank):
            todo.append(f'B{b}'); b += 1
        else:
            todo.append(f'W{w}'); w += 1
    return todo
