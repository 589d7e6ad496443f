# told: it holds a W; here a backward is undivided
def gpipe(rank, p, m):
    return [f"{kind}{i}" for kind in "FBW" for i in range(m)]
