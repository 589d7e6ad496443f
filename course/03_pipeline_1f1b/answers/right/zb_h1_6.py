# the first r W wait until the end, every other W follows its B: as fast, and as many activations
from exercises.one_f_one_b import one_f_one_b


def zb_h1(rank, p, m):
    todo = []
    for word in one_f_one_b(rank, p, m):
        todo.append(word)
        if word[0] == "B" and int(word[1:]) >= rank:
            todo.append("W" + word[1:])
    return todo + [f"W{i}" for i in range(min(rank, m))]
