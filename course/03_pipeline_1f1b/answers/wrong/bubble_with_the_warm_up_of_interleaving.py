# told: count each hop twice
def bubble(p, m, v):
    return (p - 1) / m if v == 1 else 2 * (p - 1) / (m * v)
