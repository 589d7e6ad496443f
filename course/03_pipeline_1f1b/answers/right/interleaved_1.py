# F and B of every slot by one function; one forward more in the warm-up
def interleaved(rank, p, m, v):
    def slot(k, back):
        group, at = divmod(k, p * v)
        chunk, i = divmod(at, p)
        chunk = v - 1 - chunk if back else chunk
        return f"{'B' if back else 'F'}{group * p + i}.{chunk}"
    w = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
    todo = [slot(k, False) for k in range(w)]
    for k in range(m * v):
        if w + k < m * v:
            todo.append(slot(w + k, False))
        todo.append(slot(k, True))
    return todo
