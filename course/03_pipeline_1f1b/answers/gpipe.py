from labkit.answers import Edit

WRONG = [
    Edit("range(m)]\n", "range(m - 1)]\n", told="never does B"),
    Edit(
        '[f"B{i}" for i in range(m)]',
        '[f"B{i}" for i in (range(m) if rank else range(m)[::-1])]',
        told="another order than rank 1",
    ),
    # backwards of every rank
    Edit('"B{i}" for i', '"B{i}" for _ in range(p) for i', told="times (places"),
]


# %% right: words of one string
def gpipe(rank, p, m):
    return ' '.join(k + str(i) for k in 'FB' for i in range(m)).split()


# %% right: a tuple, and every word names chunk 0
def gpipe(rank, p, m):
    todo = ()
    for i in range(2 * m):
        todo += ('FB'[i // m] + str(i % m) + '.0',)
    return todo


# %% right: a generator
def gpipe(rank, p, m):
    for kind in "FB":
        for i in range(m):
            yield f"{kind}{i}"


# %% right: a NumPy array of words
import numpy
def gpipe(rank, p, m):
    return numpy.array([f"F{i}" for i in range(m)] + [f"B{i}" for i in range(m)])


# %% right: the package's own words
from itertools import chain
from minimegatron.parallel.pipeline.actions import Action
def gpipe(rank, p, m):
    return list(map(str, chain((Action("F", i) for i in range(m)), (Action("B", i) for i in range(m)))))


# %% right: an order of backwards of its own, the same on all ranks: the even ones, then the odd ones
def gpipe(rank, p, m):
    backwards = [*range(0, m, 2), *range(1, m, 2)]
    return [f"F{i}" for i in range(m)] + [f"B{i}" for i in backwards]


# %% wrong: at least p microbatches
# told: microbatches
def gpipe(rank, p, m):
    n = max(p, m)
    return [f"F{i}" for i in range(n)] + [f"B{i}" for i in range(n)]


# %% wrong: counts from one
# told: it names microbatch 3; with m=3 they are 0, 1, 2
def gpipe(rank, p, m):
    return [f"F{i}" for i in range(1, m + 1)] + [f"B{i}" for i in range(1, m + 1)]


# %% wrong: every backward split
# told: it holds a W; here a backward is undivided
def gpipe(rank, p, m):
    return [f"{kind}{i}" for kind in "FBW" for i in range(m)]


# %% wrong: forwards only
# told: it holds no B
def gpipe(rank, p, m):
    return [f"F{i}" for i in range(m)]


# %% wrong: imports the package
# told: closed
from minimegatron.parallel.pipeline.schedules import gpipe as theirs
def gpipe(rank, p, m):
    return [str(action) for action in theirs(p, m).actions[rank]]


# %% wrong: last rank goes back from the end
# told: another order than rank
def gpipe(rank, p, m):
    back = range(m) if rank < p - 1 else reversed(range(m))
    return [f"F{i}" for i in range(m)] + [f"B{i}" for i in back]


# %% wrong: one microbatch after another
# told: before its last forward
def gpipe(rank, p, m):
    return [w for i in range(m) for w in (f'F{i}', f'B{i}')]


# %% wrong: one string
# told: returns one string
def gpipe(rank, p, m):
    return ' '.join(k + str(i) for k in 'FB' for i in range(m))


# %% wrong: pairs not words
# told: a list of words is wanted
def gpipe(rank, p, m):
    return [('F', 0)]


# %% wrong: the first two swapped on odd ranks
# told: another order than rank
def gpipe(rank, p, m):
    order = list(range(m))
    if rank % 2:
        order[:2] = order[:2][::-1]
    return [f"F{i}" for i in order] + [f"B{i}" for i in order]


# %% wrong: unknown word
# told: `backward` is no action
def gpipe(rank, p, m):
    return ['F0', 'backward']


# %% wrong: words for waiting
# told: no words for waiting
def gpipe(rank, p, m):
    """A word for every step, also where the rank waits."""
    forward = [f"F{i}" for i in range(m)]
    backward = [f"B{i}" for i in range(m)]
    return ["-"] * rank + forward + ["-"] * 3 * (p - 1 - rank) + backward + ["-"] * 2 * rank
