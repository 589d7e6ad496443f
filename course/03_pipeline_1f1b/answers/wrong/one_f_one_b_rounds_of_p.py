# told: a round of forwards and a round of backwards take turns
def one_f_one_b(rank, p, m):
    """No rank keeps more than p: go back after p forwards."""
    todo = []
    for first in range(0, m, p):
        part = range(first, min(first + p, m))
        todo += [f"F{i}" for i in part] + [f"B{i}" for i in part]
    return todo
