# told: closed in this exercise
def legal(model, gpus, node, batch):
    from minimegatron.planner.layouts import layouts

    return [(one.tp, one.cp, one.pp, one.v, one.ep, one.etp, one.micro_batch) for one in layouts(model, gpus, node)]
