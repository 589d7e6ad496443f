# told: expected a tensor
def positions(s, cp, rank):
    n = s // (2 * cp)
    return [*range(rank * n, (rank + 1) * n), *range(s - (rank + 1) * n, s - rank * n)]
