# told: idle time over *work*
def bubble(p, m, v):
    return (p - 1) / (m + p - 1)
