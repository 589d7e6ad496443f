from labkit.answers import Edit

WRONG = [
    # W at once: the bubble is larger
    Edit(
        "if i >= rank:",
        "if True:",
        ("W{i - rank}", "W{i}"),
        ("range(max(0, m - rank), m)", "[]"),
        told="W right after B here",
    ),
    # all W at the end: even slower, and the memory of GPipe
    Edit("if i >= rank:", "if False:", ("range(max(0, m - rank), m)", "range(m)"), told="All W come at the end"),
    # mirrored, and the same on all ranks
    Edit(
        "if i >= rank:",
        "if i >= p - 1 - rank:",
        ("W{i - rank}", "W{i - (p - 1 - rank)}"),
        ("range(max(0, m - rank), m)", "range(max(0, m - (p - 1 - rank)), m)"),
        told="Rank 0 puts its W off longest",
    ),
    Edit(
        "if i >= rank:",
        "if i >= p - 1:",
        ("W{i - rank}", "W{i - (p - 1)}"),
        ("range(max(0, m - rank), m)", "range(max(0, m - (p - 1)), m)"),
        told="Every rank puts its W off by p-1",
    ),
    Edit(
        """        todo.append(f"B{i}")
        if i >= rank:
            todo.append(f"W{i - rank}")""",
        '        todo += [f"W{i}", f"B{i}"]',
        ("range(max(0, m - rank), m)", "[]"),
        told="before its own B",
    ),
    # more microbatches than ranks
    Edit(
        "warmup = min(m, p - rank - 1)",
        "warmup = p - rank - 1",
        ("max(0, m - rank)", "m - rank"),
        told="every backward is to be split | never does | is no action",
    ),
]


# %% right: keep p activations at most, and do a W whenever one more would not fit
def zb_h1(rank, p, m):
    todo, f, b, w = [], 0, 0, 0
    while w < m:
        if f < m and f - b < p - rank and f - w < p:
            todo.append(f'F{f}'); f += 1
        elif b < f and b - w <= rank and (f == m or f - b >= p - rank):
            todo.append(f'B{b}'); b += 1
        else:
            todo.append(f'W{w}'); w += 1
    return todo


# %% right: by time step: what falls on this one
def zb_h1(rank, p, m):
    todo = []
    for step in range(m + p):
        f, b = step, step - (p - rank - 1)
        w = b - rank
        todo += [f'{k}{i}' for k, i in (('F', f), ('B', b), ('W', w)) if 0 <= i < m]
    return todo


# %% right: a generator, after one_f_one_b
from exercises.one_f_one_b import one_f_one_b
def zb_h1(rank, p, m):
    for word in one_f_one_b(rank, p, m):
        yield word
        if word[0] == "B" and int(word[1:]) >= rank:
            yield f"W{int(word[1:]) - rank}"
    yield from (f"W{i}" for i in range(max(0, m - rank), m))


# %% right: a queue of what is to be done later
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


# %% right: what is left of W at the end comes from the last to the first
def zb_h1(rank, p, m):
    warmup = min(m, p - rank - 1)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m):
        todo += [f"F{warmup + i}"] * (warmup + i < m) + [f"B{i}"] + [f"W{i - rank}"] * (i >= rank)
    return todo + [f"W{i}" for i in reversed(range(max(0, m - rank), m))]


# %% right: the first r W wait until the end, every other W follows its B: as fast, and as many activations
from exercises.one_f_one_b import one_f_one_b


def zb_h1(rank, p, m):
    todo = []
    for word in one_f_one_b(rank, p, m):
        todo.append(word)
        if word[0] == "B" and int(word[1:]) >= rank:
            todo.append("W" + word[1:])
    return todo + [f"W{i}" for i in range(min(rank, m))]


# %% wrong: at most two later
# told: are enough
def zb_h1(rank, p, m):
    warmup, late = min(m, p - rank - 1), min(rank, 2)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m):
        if warmup + i < m:
            todo.append(f"F{warmup + i}")
        todo.append(f"B{i}")
        if i >= late:
            todo.append(f"W{i - late}")
    return todo + [f"W{i}" for i in range(max(0, m - late), m)]


# %% wrong: backward not split
# told: every backward is to be split
def zb_h1(rank: int, p: int, m: int) -> list[str]:
    """Warm-up forwards, then F and B in turn, then the remaining backwards."""
    warmup = min(m, p - rank - 1)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m - warmup):
        todo += [f"F{warmup + i}", f"B{i}"]
    return todo + [f"B{i}" for i in range(m - warmup, m)]


# %% wrong: distance from the end
# told: are enough | activations at a time
def zb_h1(rank, p, m):
    warmup, late = min(m, p - rank - 1), p - 1 - rank
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m):
        if warmup + i < m:
            todo.append(f"F{warmup + i}")
        todo.append(f"B{i}")
        if i >= late:
            todo.append(f"W{i - late}")
    return todo + [f"W{i}" for i in range(max(0, m - late), m)]


# %% wrong: every second backward split
# told: every backward is to be split
def zb_h1(rank, p, m):
    warmup = min(m, p - rank - 1)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m):
        todo += [f"F{warmup + i}"] * (warmup + i < m) + [f"B{i}"]
        todo += [f"W{i - rank}"] * (i >= rank and (i - rank) % 2 == 0)
    return todo + [f"W{i}" for i in range(max(0, m - rank), m) if i % 2 == 0]


# %% wrong: imports the package
# told: closed
from minimegatron.parallel.pipeline.schedules import zb_h1 as theirs
def zb_h1(rank, p, m):
    return [str(action) for action in theirs(p, m).actions[rank]]


# %% wrong: last rank only
# told: are enough
def zb_h1(rank, p, m):
    warmup, late = min(m, p - rank - 1), (rank if rank == p - 1 else 0)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m):
        if warmup + i < m:
            todo.append(f"F{warmup + i}")
        todo.append(f"B{i}")
        if i >= late:
            todo.append(f"W{i - late}")
    return todo + [f"W{i}" for i in range(max(0, m - late), m)]


# %% wrong: loses the last weights
# told: is to be split
def zb_h1(rank, p, m):
    todo = []
    for step in range(m + p - rank - 1):
        f, b, w = step, step - (p - rank - 1), step - (p - 1)
        todo += [f"{k}{i}" for k, i in zip("FBW", (f, b, w)) if 0 <= i < m]
    return todo


# %% wrong: one earlier
# told: are enough
def zb_h1(rank, p, m):
    warmup, late = min(m, p - rank - 1), max(0, rank - 1)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m):
        if warmup + i < m:
            todo.append(f"F{warmup + i}")
        todo.append(f"B{i}")
        if i >= late:
            todo.append(f"W{i - late}")
    return todo + [f"W{i}" for i in range(max(0, m - late), m)]


# %% wrong: one later
# told: activations at a time
def zb_h1(rank, p, m):
    warmup, late = min(m, p - rank - 1), rank + 1
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m):
        if warmup + i < m:
            todo.append(f"F{warmup + i}")
        todo.append(f"B{i}")
        if i >= late:
            todo.append(f"W{i - late}")
    return todo + [f"W{i}" for i in range(max(0, m - late), m)]


# %% wrong: one microbatch after another
# told: are enough
def zb_h1(rank, p, m):
    return [f"{k}{i}" for i in range(m) for k in "FBW"]


# %% wrong: one more warm up
# told: the warm-up differs
def zb_h1(rank, p, m):
    todo, f, b, w = [], 0, 0, 0
    while b < m:
        while f < m and f - b < p - rank + 1:
            todo.append(f"F{f}")
            f += 1
        todo.append(f"B{b}")
        b += 1
        if b - w > rank:
            todo.append(f"W{w}")
            w += 1
    return todo + [f"W{i}" for i in range(w, m)]


# %% wrong: w before the next b
# told: before its own B
def zb_h1(rank, p, m):
    warmup = min(m, p - rank - 1)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m):
        todo += [f"F{warmup + i}"] * (warmup + i < m)
        todo += [f"W{i - rank}"] * (i >= rank) + [f"B{i}"]
    return todo + [f"W{i}" for i in range(max(0, m - rank), m)]


# %% wrong: words later
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
