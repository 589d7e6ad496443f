# told: the warm-up differs
def zb_h1(rank, p, m):
    todo, f, b, w = [], 0, 0, 0
    while b < m:
        while f < m and f - b < p - rank + 1:
            todo.append(f"F{f}")
            f += 1
        todo.append(f"B{b}")
        b += 1
        if b - w > rank:
            todo.append(f"W{w}")
            w += 1
    return todo + [f"W{i}" for i in range(w, m)]
