from labkit.answers import Edit

WRONG = [
    Edit("p - rank - 1", "p - 1", told="Every rank warms up with p-1 forwards here"),
    Edit("p - rank - 1", "rank", told="Rank r warms up with r forwards here"),
    Edit("p - rank - 1", "p - rank", told="one forward more than it has hops"),
    Edit("p - rank - 1", "2 * (p - rank - 1)", told="twice as many forwards"),
    Edit("p - rank - 1", "max(1, p - rank - 1)", told="the last rank warms up, too"),
    Edit("min(m, p - rank - 1)", "p - rank - 1", told="is no action"),
    Edit('[f"F{warmup + i}", f"B{i}"]', '[f"B{i}", f"F{warmup + i}"]', told="before its own F"),
    # at least one forward first
    Edit("warmup = min(m, p - rank - 1)", "warmup = min(m, max(1, p - rank - 1))", told="activations at a time"),
    # gpipe when m is p
    Edit("warmup = min(m, p - rank - 1)", "warmup = min(m, p - rank - 1 + (m == p))", told="activations at a time"),
    # half of m
    Edit(
        "warmup = min(m, p - rank - 1)",
        "warmup = min(m, max(p - rank - 1, m // 4))",
        told="activations at a time | are enough",
    ),
    # middle ranks wait
    Edit("p - rank - 1", "0 if rank == p - 1 else max(1, (p - rank - 1) // 2 * 2)", told="are enough | waits for the"),
    Edit(
        'todo + [f"B{i}" for i in range(m - warmup, m)]',
        '" ".join(todo + [f"B{i}" for i in range(m - warmup, m)])',
        told="returns one string",
    ),
]


# %% right: counting what is under way
def one_f_one_b(rank, p, m):
    todo, f, b = [], 0, 0
    while b < m:
        if f < m and f - b < p - rank:
            todo.append(f'F{f}')
            f += 1
        else:
            todo.append(f'B{b}')
            b += 1
    return todo


# %% right: warm-up of one forward more, and then B before F
def one_f_one_b(rank, p, m):
    w = min(m, p - rank)
    todo = [f'F{i}' for i in range(w)]
    for i in range(m):
        todo += [f'B{i}'] + [f'F{w + i}'] * (w + i < m)
    return todo


# %% right: sorted by the time slots of the schedule
def one_f_one_b(rank, p, m):
    slots = {('F', i): 2 * i + rank for i in range(m)}
    slots |= {('B', i): 2 * i + 2 * p - 1 - rank for i in range(m)}
    return [k + str(i) for k, i in sorted(slots, key=slots.get)]


# %% right: a generator
def one_f_one_b(rank, p, m):
    ahead = p - 1 - rank
    for k in range(m + ahead):
        if k < m:
            yield f"F{k}"
        if k >= ahead:
            yield f"B{k - ahead}"


# %% right: chain, zip_longest and a filter
from itertools import chain, zip_longest
def one_f_one_b(rank, p, m):
    f, b = [f"F{i}" for i in range(m)], [f"B{i}" for i in range(m)]
    w = p - 1 - rank
    return filter(None, chain(f[:w], chain.from_iterable(zip_longest(f[w:], b))))


# %% right: a NumPy array; what is missing is cut out at the end
import numpy as np
def one_f_one_b(rank, p, m):
    w = p - 1 - rank
    words = [word for k in range(m + w) for word in ((f"F{k}", k < m), (f"B{k - w}", k >= w))]
    return np.array([word for word, there in words if there], dtype=object)


# %% wrong: a list of lists
# told: a list of words is wanted
def one_f_one_b(rank, p, m):
    return [["F0", "B0"]] * m


# %% wrong: builds by name
# told: closed
import importlib
def one_f_one_b(rank, p, m):
    package = importlib.import_module("minimegatron.parallel.pipeline.schedules")
    return list(map(str, package.build_schedule("1f1b", p, m).actions[rank]))


# %% wrong: imports the package
# told: closed
import minimegatron.parallel.pipeline.schedules as package
def one_f_one_b(rank, p, m):
    return " ".join(str(action) for action in package.one_f_one_b(p, m).actions[rank])


# %% wrong: is gpipe
# told: activations at a time
def one_f_one_b(rank, p, m):
    return [f'F{i}' for i in range(m)] + [f'B{i}' for i in range(m)]


# %% wrong: more than p microbatches
# told: it names microbatch 1; with m=1 there is only 0
def one_f_one_b(rank, p, m):
    w = p - 1 - rank
    todo = [f"F{i}" for i in range(w)]
    for i in range(max(m - w, 1)):
        todo += [f"F{w + i}", f"B{i}"]
    return todo + [f"B{i}" for i in range(max(m - w, 1), m)]


# %% wrong: newest goes back first
# told: are enough
def one_f_one_b(rank, p, m):
    todo, stack = [], []
    for i in range(m):
        todo.append(f"F{i}")
        stack.append(i)
        if len(stack) >= p - rank:
            todo.append(f"B{stack.pop()}")
    return todo + [f"B{stack.pop()}" for _ in range(len(stack))]


# %% wrong: one microbatch after another
# told: are enough
def one_f_one_b(rank, p, m):
    return [w for i in range(m) for w in (f'F{i}', f'B{i}')]


# %% wrong: own backward at once
# told: while an older one still waits
def one_f_one_b(rank, p, m):
    """After the warm-up each microbatch goes back right behind its own forward."""
    warmup = min(m, p - 1 - rank)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(warmup, m):
        todo += [f"F{i}", f"B{i}"]
    return todo + [f"B{i}" for i in range(warmup)]


# %% wrong: reads the package
# told: may not read
import minimegatron.parallel.pipeline.actions as actions
from pathlib import Path
def one_f_one_b(rank, p, m):
    names = {"__name__": "mine"}
    exec(Path(actions.__file__).with_name("schedules.py").read_text(), names)
    return list(map(str, names["one_f_one_b"](p, m).actions[rank]))


# %% wrong: rounds of p
# told: a round of forwards and a round of backwards take turns
def one_f_one_b(rank, p, m):
    """No rank keeps more than p: go back after p forwards."""
    todo = []
    for first in range(0, m, p):
        part = range(first, min(first + p, m))
        todo += [f"F{i}" for i in part] + [f"B{i}" for i in part]
    return todo


# %% wrong: without an end
# told: more than
from itertools import count
def one_f_one_b(rank, p, m):
    return (f"F{i}" for i in count())
