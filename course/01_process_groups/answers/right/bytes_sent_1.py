# the steps are counted: an all-reduce takes twice N-1 of them
def bytes_sent(op, nbytes, ranks):
    steps = (ranks - 1) * (2 if op == 'all_reduce' else 1)
    return steps * nbytes / ranks
