from labkit.answers import Edit, Same

_CHUNKS = 'divisors(model["layers"] // pp) if pp > 1 and m % pp == 0 else [1]'
_WORLD = "gpus % (etp * ep * pp) == 0"

WRONG = [
    Edit('or model["groups"] % tp', "", told="heads and the groups"),
    Edit("powers(node)", "divisors(node)", told="power of two"),
    Edit("powers(node)", "powers(gpus)", told="at most a node"),
    Edit('powers(max(1, model["s"] // 4096))', "powers(gpus)", told="4096"),
    Edit('powers(max(1, model["s"] // 4096))', "[1]", told="missing"),
    Edit("if gpus % (tp * cp * pp):", "if gpus < tp * cp * pp:", told="divides the GPUs"),
    Edit("batch % (dp * micro)", "batch % dp", told="divides the batch"),
    Edit(" and m % pp == 0", "", told="microbatches"),
    Edit("pp > 1 and m % pp == 0", "m % pp == 0", told="needs a pipeline"),
    Edit('divisors(model["layers"] // pp)', 'divisors(model["layers"])', told="divides the layers"),
    Edit(_CHUNKS, "[1]", told="missing"),
    Edit("{1, tp} if", "(1, tp) if", told="twice"),
    Edit('{1, tp} if model["experts"] else {1}', "{1, tp}", told="1 without experts"),
    Edit(_WORLD, "True", told="etp ep pp"),
    Edit(_WORLD, "gpus % (tp * cp * pp * ep) == 0", told="missing"),
    Edit("(tp, cp, pp, v, ep, etp, micro) for", "(tp, cp, pp, ep, v, etp, micro) for", told="changed places"),
    Edit('divisors(model["layers"]):', 'powers(model["layers"]):', told="pp v divides the layers"),
]

RIGHT = [
    Edit("return found", "return [list(one) for one in found]"),
    Edit("return found", "return sorted(set(found), reverse=True)"),
    Edit(_WORLD, "(tp * cp * dp) % (etp * ep) == 0"),
]

_POWERS = "the largest power below 2^bit_length is at most the number; a larger one is filtered"
EQUIVALENT = [
    Same("line 4: 2 for 1", "n + 1 does not divide n"),
    *(Same(f"line 7: {how}", _POWERS) for how in ("1 for 2 (2)", "condition dropped", "range's `most.bit_length()` + 1")),
    Same("line 11: only `model['groups'] % tp`", "the groups divide the heads"),
    *(Same(f"line {line}", "every division here divides evenly") for line in (
        "17: `/` for `//`", "17: rounded up for down", "21: `/` for `//`", "21: rounded up for down",
        "22: rounded up for down")),
]


# %% right: everything up to the sizes, with one test
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


# %% wrong: asks the planner
# told: closed in this exercise
def legal(model, gpus, node, batch):
    from minimegatron.planner.layouts import layouts

    return [(one.tp, one.cp, one.pp, one.v, one.ep, one.etp, one.micro_batch) for one in layouts(model, gpus, node)]
