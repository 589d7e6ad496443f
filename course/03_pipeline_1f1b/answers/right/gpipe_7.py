# an order of backwards of its own, the same on all ranks: the even ones, then the odd ones
def gpipe(rank, p, m):
    backwards = [*range(0, m, 2), *range(1, m, 2)]
    return [f"F{i}" for i in range(m)] + [f"B{i}" for i in backwards]
