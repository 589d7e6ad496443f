# told:
def verify(p, q, proposed, u, v):
    mass = p[len(proposed)].cumsum(0)
    return [*proposed, int((mass <= v[len(proposed)] * mass[-1]).sum())]
