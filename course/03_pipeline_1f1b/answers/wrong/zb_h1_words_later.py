# told: asked are r microbatches
from exercises.one_f_one_b import one_f_one_b


def zb_h1(rank, p, m):
    """Each W r words behind its B."""
    todo, due = [], []
    for place, word in enumerate(one_f_one_b(rank, p, m)):
        todo.append(word)
        if word[0] == "B":
            due.append((place + rank, "W" + word[1:]))
        while due and due[0][0] <= place:
            todo.append(due.pop(0)[1])
    return todo + [word for _, word in due]
