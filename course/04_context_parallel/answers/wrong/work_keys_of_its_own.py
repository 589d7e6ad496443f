# told: own keys alone
def work(s, cp, zigzag):
    n = s // (2 * cp)
    pairs = [sum(range(c * n + 1, (c + 1) * n + 1)) for c in range(2 * cp)]
    if zigzag:
        return [n * (2 * n + 1)] * cp
    return [n * (2 * n + 1)] * cp
