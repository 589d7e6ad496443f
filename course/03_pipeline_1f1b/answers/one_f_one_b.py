from labkit.answers import Edit

_AHEAD, _REST = "min(m, p - rank - 1)", 'todo + [f"B{i}" for i in range(m - warmup, m)]'

WRONG = [
    Edit(_AHEAD, "0", mistake="Here every rank does F0 B0, F1 B1, ...: no rank warms up, and one microbatch is under way."),
    Edit(_AHEAD, "m", mistake="This is GPipe: every rank does all its forwards first."),
    Edit(_AHEAD, "min(m, rank)", mistake="Rank r warms up with r forwards here, the last rank longest. But the first gradient comes from the last rank."),
    Edit(_AHEAD, "min(m, p - 1)", mistake="Every rank warms up with p-1 forwards here, also the last, which could go back at once."),
    Edit(_AHEAD, "min(m, p - rank)", mistake="Each rank warms up with one forward more than it has hops to the last rank, and then does another forward."),
    Edit(_AHEAD, "min(m, max(1, p - rank - 1))", mistake="Here the last rank warms up, too, though it could go back right after F0."),
    Edit('f"B{i}"]\n', 'f"B{warmup + i}"]\n', ("range(m - warmup, m)", "range(warmup)"), mistake="A newer microbatch goes back here while an older one still waits. Microbatches go back in the order they came."),
    Edit(_AHEAD, "p - rank - 1", told="is no action"),
    Edit(_AHEAD, "min(m, 2 * (p - rank - 1))", told="activations at a time"),
    Edit(_AHEAD, "min(m, p - rank - 1 + (m == p))", told="activations at a time"),
    Edit(_AHEAD, "min(m, max(p - rank - 1, m // 4))", told="activations at a time | are enough"),
    Edit("p - rank - 1", "0 if rank == p - 1 else max(1, (p - rank - 1) // 2 * 2)", told="are enough | waits for the"),
    Edit('[f"F{warmup + i}", f"B{i}"]', '[f"B{i}", f"F{warmup + i}"]', told="before its own F"),
    Edit(_REST, f'" ".join({_REST})', told="returns one string"),
    Edit(_REST, f"[{_REST}]", told="a list of words is wanted"),
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


# %% right: a generator
def one_f_one_b(rank, p, m):
    ahead = p - 1 - rank
    for k in range(m + ahead):
        if k < m:
            yield f"F{k}"
        if k >= ahead:
            yield f"B{k - ahead}"


# %% wrong: rounds of p
# mistake: Here a round of forwards and a round of backwards take turns: with every round the pipeline drains and fills again.
def one_f_one_b(rank, p, m):
    """No rank keeps more than p: go back after p forwards."""
    todo = []
    for first in range(0, m, p):
        part = range(first, min(first + p, m))
        todo += [f"F{i}" for i in part] + [f"B{i}" for i in part]
    return todo


# %% wrong: reads the package
# told: may not read
import minimegatron.parallel.pipeline.actions as actions
from pathlib import Path
def one_f_one_b(rank, p, m):
    names = {"__name__": "mine"}
    exec(Path(actions.__file__).with_name("schedules.py").read_text(), names)
    return list(map(str, names["one_f_one_b"](p, m).actions[rank]))
