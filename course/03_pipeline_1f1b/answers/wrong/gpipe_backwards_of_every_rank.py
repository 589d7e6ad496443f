# told: times (places
def gpipe(rank, p, m):
    return [f"F{i}" for i in range(m)] + [f"B{i}" for _ in range(p) for i in range(m)]
