# told: how many queries see
def work(s, cp, zigzag):
    n = s // (2 * cp)
    pairs = [sum(range(c * n + 1, (c + 1) * n + 1)) for c in range(2 * cp)]
    if zigzag:
        return [pairs[r] + pairs[2 * cp - 1 - r] for r in range(cp)]
    return [pairs[2 * r] + pairs[2 * r + 1] for r in range(cp)][::-1]
