# told: what arrives is not sent
def bytes_sent(op, nbytes, ranks):
    sent = nbytes * (ranks - 1) / ranks
    received = sent
    return (sent + received) * (2 if op == "all_reduce" else 1)
