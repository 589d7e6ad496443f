# told: microbatches
def gpipe(rank, p, m):
    n = max(p, m)
    return [f"F{i}" for i in range(n)] + [f"B{i}" for i in range(n)]
