# closed formulas
def work(s, cp, zigzag):
    if zigzag:
        return [s * (s + 1) // 2 // cp] * cp
    n = s // cp
    return [r * n * n + n * (n + 1) // 2 for r in range(cp)]
