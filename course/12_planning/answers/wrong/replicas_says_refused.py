# told: a ValueError
# the word of the table in place of an error
def replicas(world, tp, cp, pp, ep, etp):
    if world % (tp * cp * pp) or world % (etp * ep * pp):
        return {"refused": True}
    dp = world // (tp * cp * pp)
    return {"dp": dp, "dense": dp * cp, "expert": world // (etp * ep * pp)}
