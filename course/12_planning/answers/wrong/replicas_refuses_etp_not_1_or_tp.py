# told: gives whole numbers
# the rule of another table is asked for, too
def replicas(world, tp, cp, pp, ep, etp):
    if world%(tp*cp*pp) or world%(pp*ep*etp) or etp not in (1,tp):
        raise ValueError("not whole")
    dp = world//(tp*cp*pp)
    return {"dp": dp, "dense": dp*cp, "expert": world//(pp*ep*etp)}
