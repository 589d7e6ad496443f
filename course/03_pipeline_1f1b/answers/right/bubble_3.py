# the whole time over the work, less one
def bubble(p, m, v):
    return (m * v + p - 1) / (m * v) - 1
