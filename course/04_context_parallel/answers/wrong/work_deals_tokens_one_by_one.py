# told: one by one
def work(s, cp, zigzag):
    n = s // cp
    if not zigzag:
        return [sum(range(r * n + 1, (r + 1) * n + 1)) for r in range(cp)]
    return [sum(range(r + 1, s + 1, cp)) for r in range(cp)]
