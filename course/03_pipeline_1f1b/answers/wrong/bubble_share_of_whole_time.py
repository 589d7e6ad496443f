# told: share of the whole time
def bubble(p, m, v):
    b = (p - 1) / (v * m)
    return b / (1 + b)
