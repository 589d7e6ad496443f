# told: takes v times as long
def bubble(p, m, v):
    return v * (p - 1) / m
