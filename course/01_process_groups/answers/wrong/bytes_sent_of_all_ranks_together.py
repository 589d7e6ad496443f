# told: N times too much
def bytes_sent(op, nbytes, ranks):
    return (2 if op == "all_reduce" else 1) * nbytes * (ranks - 1)
