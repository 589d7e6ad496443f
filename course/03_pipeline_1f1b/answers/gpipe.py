from labkit.answers import Edit

_FORWARDS, _BACKWARDS = '[f"F{i}" for i in range(m)]', '[f"B{i}" for i in range(m)]'

WRONG = [
    Edit(f"{_FORWARDS} + {_BACKWARDS}", '[word for i in range(m) for word in (f"F{i}", f"B{i}")]', mistake="Here each microbatch goes back before the next one begins, so only one is ever under way."),
    Edit("range(m)]\n", "range(m - 1)]\n", told="never does B"),
    Edit(_BACKWARDS, '[f"B{i}" for i in (range(m) if rank else range(m)[::-1])]', told="another order than rank 1"),
    Edit('"B{i}" for i', '"B{i}" for _ in range(p) for i', told="times (places"),
    Edit("range(m)", "range(max(p, m))", told="microbatches"),
    Edit(_BACKWARDS, '["backward"]', told="`backward` is no action"),
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


# %% right: the package's own words
from itertools import chain
from minimegatron.parallel.pipeline.actions import Action
def gpipe(rank, p, m):
    return list(map(str, chain((Action("F", i) for i in range(m)), (Action("B", i) for i in range(m)))))


# %% right: an order of backwards of its own, the same on all ranks: the even ones, then the odd ones
def gpipe(rank, p, m):
    backwards = [*range(0, m, 2), *range(1, m, 2)]
    return [f"F{i}" for i in range(m)] + [f"B{i}" for i in backwards]
