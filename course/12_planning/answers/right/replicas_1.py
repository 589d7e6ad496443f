# ranks are numbered and grouped by what they hold
from collections import Counter


def replicas(world, tp, cp, pp, ep, etp):
    stage, rest = divmod(world, pp)
    if rest or stage % (tp * cp) or stage % (etp * ep):
        raise ValueError("the layout does not divide the ranks")
    dense = Counter((rank // stage, rank % tp) for rank in range(world))
    expert = Counter((rank // stage, rank % etp, rank // etp % ep) for rank in range(world))
    return {"dp": dense[0, 0] // cp, "dense": dense[0, 0], "expert": expert[0, 0, 0]}
