# told: more than
from itertools import count
def one_f_one_b(rank, p, m):
    return (f"F{i}" for i in count())
