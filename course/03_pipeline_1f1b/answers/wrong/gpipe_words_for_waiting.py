# told: no words for waiting
def gpipe(rank, p, m):
    """A word for every step, also where the rank waits."""
    forward = [f"F{i}" for i in range(m)]
    backward = [f"B{i}" for i in range(m)]
    return ["-"] * rank + forward + ["-"] * 3 * (p - 1 - rank) + backward + ["-"] * 2 * rank
