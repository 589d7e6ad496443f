# the paper's own order: backwards from the last microbatch to the first
def gpipe(rank, p, m):
    return [f'F{i}' for i in range(m)] + [f'B{i}' for i in reversed(range(m))]
