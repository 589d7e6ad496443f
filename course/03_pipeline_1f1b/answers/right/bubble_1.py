# idle hops of length 1/v over m
def bubble(p, m, v):
    hop = 1 / v
    return (p - 1) * hop / m
