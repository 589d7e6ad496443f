# told: idle steps alone
def bubble(p, m, v):
    total = 3 * (m + (p - 1) / v)
    return total - 3 * m
