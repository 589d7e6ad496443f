# it calls itself: an all-reduce is a reduce-scatter and an all-gather
def bytes_sent(op, nbytes, ranks):
    if op == 'all_reduce':
        return bytes_sent('reduce_scatter', nbytes, ranks) + bytes_sent('all_gather', nbytes, ranks)
    return nbytes - nbytes / ranks
