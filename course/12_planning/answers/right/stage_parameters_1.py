# every matrix with its place in the model
def stage_parameters(model, layers, first, last, tp, ep, etp):
    h, d, heads, groups, f = (model[name] for name in ("h", "d", "heads", "groups", "f"))
    step = 128 * tp
    words = model["vocab"]
    while words % step:
        words += 1
    cut = {"q": h * heads * d, "o": h * heads * d, "k": h * groups * d, "v": h * groups * d}
    whole = {"norm 1": h, "norm 2": h}
    of_experts = 0
    if model["experts"] == 0:
        cut |= {name: h * f for name in ("gate", "up", "down")}
    else:
        whole["router"] = h * model["experts"]
        of_experts = sum(h * f for _ in ("gate", "up", "down")) * model["experts"] // ep // etp
    dense = layers * (sum(n // tp for n in cut.values()) + sum(whole.values()))
    tables = {"words"} if first else set()
    if last:
        dense += h
        tables.add("words" if model["tied"] else "output")
    return {"experts": layers * of_experts, "dense": dense + len(tables) * words // tp * h}
