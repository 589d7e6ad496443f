# told: are enough
def one_f_one_b(rank, p, m):
    todo, stack = [], []
    for i in range(m):
        todo.append(f"F{i}")
        stack.append(i)
        if len(stack) >= p - rank:
            todo.append(f"B{stack.pop()}")
    return todo + [f"B{stack.pop()}" for _ in range(len(stack))]
