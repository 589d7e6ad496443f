from labkit.answers import Edit, Same

_WORDS = '-(-model["vocab"] // (128 * tp)) * 128 * tp'
_TIED = '    if model["tied"] and first and last:\n        ends -= table\n'
_ROUTER, _EXPERTS = "h * experts if experts", "layers * (experts // ep) * mlp // etp"

WRONG = [
    Edit("first * table + last * (h + table)", "2 * table + h", (" and first and last", ""), mistake="Only the first stage has the table of words, only the last one the output layer."),
    Edit('model["heads"] + model["groups"]', '2 * model["heads"]', mistake="Keys and values have `groups` heads, not as many as queries."),
    Edit("mlp = 3 * h * f", "mlp = 2 * h * f", mistake="SwiGLU has a third matrix: gate, up and down."),
    Edit("else mlp // tp", "else mlp", mistake="The matrices of the MLP are cut over tp: gate and up by their outputs, down by its inputs."),
    Edit(_WORDS, 'model["vocab"]', mistake="The table is padded, so that each rank has a multiple of 128 words."),
    Edit(_TIED, "", mistake="A rank that has both ends of a tied model has one table."),
    Edit('model["tied"] and first and last', 'model["tied"] and last', mistake="The last stage of a tied model has a copy of the table when the first one is another rank: it cannot multiply with a table that lies there."),
    Edit(_ROUTER, "0 if experts", mistake="A layer with experts has a router, outside of the experts."),
    Edit("(experts // ep)", "experts", mistake="A rank has experts / ep of the experts."),
    Edit("* mlp // etp", "* mlp // tp", mistake="Experts are cut over etp, not over tp."),
    Edit(_ROUTER, "h * experts // ep if experts", mistake="A rank's tokens may go to any expert: its router has a score for all of them."),
    Edit('(model["heads"] + model["groups"]) * d', '(h + model["groups"] * d)', mistake="The queries have heads * d channels together. That need not be h."),
    Edit("layer = 2 * h +", "layer = 2 * h // tp +", mistake="Norms are on every rank of tp, whole: what is cut are the tokens between them."),
    Edit(_WORDS, '-(-model["vocab"] // 128) * 128', mistake="Each rank's part is a multiple of 128 words, so the table of all ranks is one of 128 tp."),
    Edit("last * (h + table)", "last * (h // tp + table)"),
    Edit("last * (h + table)", "last * table", mistake="The last stage has a norm before the output layer."),
    Edit(_ROUTER, "0 if experts", (_EXPERTS, f"{_EXPERTS} + layers * h * experts")),
    Edit(f"({_ROUTER} else mlp // tp)", "h * experts + mlp // tp", mistake="Experts take the place of the MLP: a layer has the one or the others."),
    Edit("layers * layer + ends", "layers * (layer + ends)"),
]

RIGHT = [
    Edit(_TIED, "    ends -= table * (model['tied'] and first and last)\n"),
    Edit(_EXPERTS, "layers * experts * mlp / (ep * etp)"),
]

EQUIVALENT = [
    Same(f"line {number}: {how}{which}", "every division here divides evenly")
    for number, which in ((8, ""), (8, " (2)"), (10, ""), (14, ""), (14, " (2)")) for how in ("`/` for `//`", "rounded up for down")
]


# %% right: every matrix with its place in the model
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


# %% right: floats
def stage_parameters(model, layers, first, last, tp, ep, etp):
    import math
    h, d, f, E = model["h"], model["d"], model["f"], model["experts"]
    head = d*h*(model["heads"]+model["groups"])*2/tp
    V = math.ceil(model["vocab"]/(128*tp))*128*tp
    tables = (first + last) if not (model["tied"] and first and last) else 1
    dense = layers*(2*h+head+(h*E if E else 3*h*f/tp)) + last*h + tables*V*h/tp
    return {"dense": dense, "experts": layers*E/ep*3*h*f/etp}


# %% wrong: asks the planner
# told: closed in this exercise
def stage_parameters(model, layers, first, last, tp, ep, etp):
    from minimegatron.footprint.states import meta_model
    from minimegatron.models.families import family_config

    config = family_config("llama", num_layers=layers, hidden_size=model["h"])
    return {"dense": sum(p.numel() for p in meta_model(config).parameters()), "experts": 0}
