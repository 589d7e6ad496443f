# told: 1/v as long
def bubble(p, m, v):
    return (p - 1) // v / m
