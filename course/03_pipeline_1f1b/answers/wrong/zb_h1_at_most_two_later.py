# told: are enough
def zb_h1(rank, p, m):
    warmup, late = min(m, p - rank - 1), min(rank, 2)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m):
        if warmup + i < m:
            todo.append(f"F{warmup + i}")
        todo.append(f"B{i}")
        if i >= late:
            todo.append(f"W{i - late}")
    return todo + [f"W{i}" for i in range(max(0, m - late), m)]
