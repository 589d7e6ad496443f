# told: the last *rank*
def bubble(p, m, v):
    stages = p * v
    return (stages - 1) / (m * v)
