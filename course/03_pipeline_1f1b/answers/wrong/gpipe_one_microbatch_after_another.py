# told: before its last forward
def gpipe(rank, p, m):
    return [w for i in range(m) for w in (f'F{i}', f'B{i}')]
