# told: are enough
def zb_h1(rank, p, m):
    return [f"{k}{i}" for i in range(m) for k in "FBW"]
