# told: lose the remainder
def bubble(p, m, v):
    return (p - 1) // v / m
