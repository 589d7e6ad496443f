# told: are enough
def one_f_one_b(rank, p, m):
    return [w for i in range(m) for w in (f'F{i}', f'B{i}')]
