# told: microbatches | never does
def gpipe(rank, p, m):
    return [f"F{i}" for i in range(1, m + 1)] + [f"B{i}" for i in range(1, m + 1)]
