# told: every backward is to be split | never does | is no action
def zb_h1(rank, p, m):
    warmup = p - rank - 1
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m):
        if warmup + i < m:
            todo.append(f"F{warmup + i}")
        todo.append(f"B{i}")
        if i >= rank:
            todo.append(f"W{i - rank}")
    return todo + [f"W{i}" for i in range(m - rank, m)]
