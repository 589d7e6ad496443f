# dp as a float
def replicas(world, tp, cp, pp, ep, etp):
    if world%(tp*cp*pp) or world%(pp*ep*etp):
        raise ValueError("not whole")
    dp = world/(tp*cp*pp)
    return {"dp": dp, "dense": dp*cp, "expert": world//(pp*ep*etp)}
