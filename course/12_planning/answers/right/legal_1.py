# everything up to the sizes, with one test
import itertools


def legal(model, gpus, node, batch):
    layers, experts = model["layers"], model["experts"]
    small = [1, 2, 4, 8, 16, 32, 64]
    found = []
    for tp, cp, pp in itertools.product(small, small, range(1, layers + 1)):
        dp = gpus / (tp * cp * pp)
        if dp < 1 or dp != int(dp) or tp > node or model["heads"] % tp or model["groups"] % tp or layers % pp:
            continue
        if cp > 1 and model["s"] / cp < 4096:
            continue
        for v, ep, etp, micro in itertools.product(range(1, layers + 1), range(1, max(experts, 1) + 1), small, small[:4]):
            m = batch / (dp * micro)
            if m != int(m) or layers % (pp * v) or (v > 1 and (pp == 1 or m % pp)):
                continue
            if etp > 1 and (etp != tp or not experts):
                continue
            if (experts and experts % ep) or gpus % (etp * ep * pp):
                continue
            found.append([tp, cp, pp, v, ep, etp, micro])
    return found
