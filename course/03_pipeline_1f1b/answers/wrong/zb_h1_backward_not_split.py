# told: every backward is to be split
def zb_h1(rank: int, p: int, m: int) -> list[str]:
    """Warm-up forwards, then F and B in turn, then the remaining backwards."""
    warmup = min(m, p - rank - 1)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m - warmup):
        todo += [f"F{warmup + i}", f"B{i}"]
    return todo + [f"B{i}" for i in range(m - warmup, m)]


