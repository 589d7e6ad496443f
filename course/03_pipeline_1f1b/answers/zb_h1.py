from labkit.answers import Edit

_IF, _W, _LEFT = "if i >= rank:", "W{i - rank}", "range(max(0, m - rank), m)"

WRONG = [
    Edit(_IF, "if True:", (_W, "W{i}"), (_LEFT, "[]"), mistake="Every rank does W right after B here, so a gradient waits for the W of all ranks that it passes later."),
    Edit(_IF, "if False:", (_LEFT, "range(m)"), mistake="All W come at the end here, so every rank keeps the activations of all its microbatches until then."),
    Edit(_IF, "if i >= p - 1 - rank:", (_W, "W{i - (p - 1 - rank)}"), (_LEFT, "range(max(0, m - (p - 1 - rank)), m)"), mistake="Rank 0 puts its W off longest here and the last rank not at all. But the last rank is the first to go back."),
    Edit(_IF, "if i >= p - 1:", (_W, "W{i - (p - 1)}"), (_LEFT, "range(max(0, m - (p - 1)), m)"), mistake="Every rank puts its W off by p-1 microbatches here. How long it may wait depends on the rank."),
    Edit(_IF, "if i > rank:", (_W, "W{i - rank - 1}"), ("m - rank)", "m - rank - 1)"), mistake="Each W comes one microbatch too late here, so a rank keeps one activation too many."),
    Edit("p - rank - 1", "p - rank", mistake="The F and B are not those of 1F1B: the warm-up differs."),
    Edit("p - rank - 1", "2 * (p - rank - 1)", mistake="The F and B are not those of 1F1B: the warm-up differs."),
    Edit('f"B{i}")', 'f"W{i}")', ("if i >= rank:", "if True:"), (_W, "B{i}"), (_LEFT, "[]"), told="before its own B"),
    Edit("min(m, p - rank - 1)", "p - rank - 1", ("max(0, m - rank)", "m - rank"), told="every backward is to be split | never does | is no action"),
    Edit("    warmup =", "    late = min(rank, 2)\n    warmup =", (_IF, "if i >= late:"), (_W, "W{i - late}"), ("m - rank)", "m - late)"), told="are enough"),
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


# %% wrong: words later
# mistake: Each W waits for a number of *words* here. What fills memory are microbatches: count them.
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


# %% wrong: imports the package
# told: closed
from minimegatron.parallel.pipeline.schedules import zb_h1 as theirs
def zb_h1(rank, p, m):
    return [str(action) for action in theirs(p, m).actions[rank]]


# %% wrong: W only where memory asks for it
# mistake: A rank puts its W off until it has no room for the next F here. Between its last B it waits for gradients, and nothing fills the gaps.
def zb_h1(rank, p, m):
    ahead = min(m, p - rank - 1)
    todo = [("F", i) for i in range(ahead)]
    for i in range(m):
        todo += [("F", ahead + i)] * (ahead + i < m) + [("B", i)]
    words, waiting, kept = [], [], 0
    for kind, i in todo:
        if kind == "F" and kept == p:
            words.append(f"W{waiting.pop(0)}")
            kept -= 1
        kept += kind == "F"
        waiting += [i] * (kind == "B")
        words.append(f"{kind}{i}")
    return words + [f"W{i}" for i in waiting]


# %% wrong: only the last rank puts W aside
# told: rank 2 waits from step 6 to 7 for the input of F2: rank 1, which sends it, does W0 first
from exercises.one_f_one_b import one_f_one_b


def zb_h1(rank, p, m):
    words, waiting = [], []
    for word in one_f_one_b(rank, p, m):
        words.append(word)
        if word[0] == "B":
            waiting.append(word[1:])
            if rank < p - 1 or len(waiting) == p:
                words.append(f"W{waiting.pop(0)}")
    return words + [f"W{i}" for i in waiting]


# %% wrong: every rank but the first puts one W aside
# told: rank 1 waits from step 8 to 9 for the input of B2: rank 2, which sends it, does W0 first, and rank 1 could do W1 meanwhile, but its list has it later
from exercises.one_f_one_b import one_f_one_b


def zb_h1(rank, p, m):
    words, waiting = [], []
    for word in one_f_one_b(rank, p, m):
        words.append(word)
        if word[0] == "B":
            waiting.append(word[1:])
            if len(waiting) > (rank > 0):
                words.append(f"W{waiting.pop(0)}")
    return words + [f"W{i}" for i in waiting]
