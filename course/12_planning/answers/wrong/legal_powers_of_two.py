# told: missing
# every size is a power of two
import itertools


def legal(model, gpus, node, batch):
    sizes = [1, 2, 4, 8, 16, 32]
    found = []
    for tp, cp, pp, v, ep, etp in itertools.product(sizes, repeat=6):
        if gpus % (tp * cp * pp) or tp > node or model["groups"] % tp or model["layers"] % (pp * v):
            continue
        if (model["experts"] or 1) % ep or gpus % (etp * ep * pp) or etp not in ((1, tp) if model["experts"] else (1,)):
            continue
        if cp > 1 and model["s"] // cp < 4096:
            continue
        dp = gpus // (tp * cp * pp)
        for micro in (1, 2, 4, 8):
            if batch % (dp * micro) == 0 and (v == 1 or (pp > 1 and batch // (dp * micro) % pp == 0)):
                found.append((tp, cp, pp, v, ep, etp, micro))
    return found
