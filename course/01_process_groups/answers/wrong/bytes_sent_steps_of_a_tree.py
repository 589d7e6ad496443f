# told: those of a tree
import math
def bytes_sent(op, nbytes, ranks):
    return (2 if op == "all_reduce" else 1) * math.log2(ranks) * nbytes / ranks
