# told: 1/v as long
def bubble(p, m, v):
    return (p - 1) / m / (2 if v > 1 else 1)
