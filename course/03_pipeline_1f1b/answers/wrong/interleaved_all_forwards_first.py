# told: activations at a time
def interleaved(rank, p, m, v):
    back = [f'B{i}.{v - 1 - c}' for c in range(v) for i in range(m)]
    return [f'F{i}.{c}' for c in range(v) for i in range(m)] + back
