# chain, zip_longest and a filter
from itertools import chain, zip_longest
def one_f_one_b(rank, p, m):
    f, b = [f"F{i}" for i in range(m)], [f"B{i}" for i in range(m)]
    w = p - 1 - rank
    return filter(None, chain(f[:w], chain.from_iterable(zip_longest(f[w:], b))))
