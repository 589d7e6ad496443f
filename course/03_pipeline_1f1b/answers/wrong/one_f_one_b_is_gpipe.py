# told: activations at a time
def one_f_one_b(rank, p, m):
    return [f'F{i}' for i in range(m)] + [f'B{i}' for i in range(m)]
