# told: it holds no B
def gpipe(rank, p, m):
    return [f"F{i}" for i in range(m)]
