# a generator, after one_f_one_b
from exercises.one_f_one_b import one_f_one_b
def zb_h1(rank, p, m):
    for word in one_f_one_b(rank, p, m):
        yield word
        if word[0] == "B" and int(word[1:]) >= rank:
            yield f"W{int(word[1:]) - rank}"
    yield from (f"W{i}" for i in range(max(0, m - rank), m))
