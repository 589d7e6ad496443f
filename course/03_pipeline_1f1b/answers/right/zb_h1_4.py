# a queue of what is to be done later
from collections import deque
def zb_h1(rank, p, m):
    words, later, w = [], deque(), min(m, p - 1 - rank)
    words += [f"F{i}" for i in range(w)]
    for i in range(m):
        words += [f"F{i + w}"] * (i + w < m) + [f"B{i}"]
        later.append(f"W{i}")
        if len(later) > rank:
            words.append(later.popleft())
    return [*words, *later]
