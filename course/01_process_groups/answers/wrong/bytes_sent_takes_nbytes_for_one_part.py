# told: one part, n/N bytes
def bytes_sent(op, nbytes, ranks):
    if op == "all_gather":
        return float(nbytes * (ranks - 1))
    return (2 if op == "all_reduce" else 1) * nbytes * (ranks - 1) / ranks
