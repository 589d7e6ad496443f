# told: counted from the end
def work(s, cp, zigzag):
    h = s // (2 * cp)
    total = lambda c: sum(range(c * h + 1, (c + 1) * h + 1))
    if zigzag:
        return [total(r) + total(cp + r) for r in range(cp)]
    return [total(2 * r) + total(2 * r + 1) for r in range(cp)]
