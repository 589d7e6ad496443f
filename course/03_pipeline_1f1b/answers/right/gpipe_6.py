# the package's own words
from itertools import chain
from minimegatron.parallel.pipeline.actions import Action
def gpipe(rank, p, m):
    return list(map(str, chain((Action("F", i) for i in range(m)), (Action("B", i) for i in range(m)))))
