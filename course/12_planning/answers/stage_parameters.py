from labkit.answers import Edit, Same

_WORDS = '-(-model["vocab"] // (128 * tp)) * 128 * tp'
_TIED = '    if model["tied"] and first and last:\n        ends -= table\n'
_WHOLE = "every division here divides evenly"

WRONG = [
    Edit('model["heads"] + model["groups"]', '2 * model["heads"]', mistake="Keys and values have `groups` heads, not as many as queries."),
    Edit('(model["heads"] + model["groups"]) * d', '(h + model["groups"] * d)', mistake="The heads are d wide, which need not be h / heads."),
    Edit("layer = 2 * h +", "layer = 2 * h // tp +", mistake="Every rank of tp has the norms whole: they are vectors of h numbers."),
    Edit("layer = 2 * h +", "layer =", mistake="A layer has two norms."),
    Edit("mlp = 3 * h * f", "mlp = 2 * h * f", mistake="SwiGLU has a third matrix: gate, up and down."),
    Edit(_WORDS, 'model["vocab"]', mistake="The table is padded, so that each rank has a multiple of 128 words."),
    Edit(_WORDS, '-(-model["vocab"] // 128) * 128', mistake="The padding is to a multiple of 128 words on each rank, not of the whole table."),
    Edit("h * experts if experts", "0 if experts", mistake="A layer with experts has a router, outside of the experts."),
    Edit("h * experts if experts", "h * experts // tp if experts", mistake="Every rank has the router whole."),
    Edit("last * (h + table)", "last * table", mistake="The last stage has one more norm."),
    Edit(_TIED, "", mistake="A rank that has both ends of a tied model has one table."),
    Edit('model["tied"] and first and last', 'model["tied"] and last', mistake="The last stage of a tied model has a copy of the table when the first one is another rank: it " "cannot multiply with a table that lies there."),
    Edit(
        "first * table + last * (h + table)", "2 * table + h", (" and first and last", ""), mistake="Only the first stage has the table of words, only the last one the output layer."
    ),
    Edit("(experts // ep)", "experts", mistake="A rank has experts / ep of the experts."),
    Edit("* mlp // etp", "* mlp // tp", mistake="Experts are cut over etp, not over tp."),
    Edit(
        '{"dense": layers * layer + ends, "experts": layers * (experts // ep) * mlp // etp}',
        '{"dense": layers * layer + ends + layers * (experts // ep) * mlp // etp, "experts": 0}',
        mistake="The parameters of experts are counted by themselves: other ranks share their state.",
    ),
    Edit("(h * experts if experts else mlp // tp)", "h * experts + mlp // tp", mistake="The experts stand in place of the MLP: a layer with experts has no other MLP."),
    Edit("h * experts if experts", "2 * h * experts if experts", mistake="A layer with experts has one router."),
    Edit("else mlp // tp", "else mlp", mistake="Keys and values are cut over tp, as queries are: each rank has its own groups."),
    Edit("last * (h + table)", "last * (h // tp + table)"),
    Edit("* mlp // etp", "* mlp"),
    Edit("* mlp // etp", "* mlp // (etp * ep)"),
    Edit("layers * layer + ends", "layers * (layer + ends)"),
]

RIGHT = [
    Edit(_WORDS, '(model["vocab"] + 128 * tp - 1) // (128 * tp) * (128 * tp)'),
    Edit(_TIED, "    ends -= table * (model['tied'] and first and last)\n"),
    Edit("layers * (experts // ep) * mlp // etp", "layers * experts * mlp / (ep * etp)"),
]

EQUIVALENT = [
    Same("line 8: `/` for `//`", _WHOLE),
    Same("line 8: `/` for `//` (2)", _WHOLE),
    Same("line 8: rounded up for down", _WHOLE),
    Same("line 8: rounded up for down (2)", _WHOLE),
    Same("line 10: `/` for `//`", _WHOLE),
    Same("line 10: rounded up for down", _WHOLE),
    Same("line 14: `/` for `//`", _WHOLE),
    Same("line 14: `/` for `//` (2)", _WHOLE),
    Same("line 14: rounded up for down", _WHOLE),
    Same("line 14: rounded up for down (2)", _WHOLE),
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


# %% wrong: router counted as expert
# mistake: The router is no part of an expert: it counts as dense.
# the router belongs to the experts
def stage_parameters(model, layers, first, last, tp, ep, etp):
    h, d, f = model["h"], model["d"], model["f"]
    per = 2*h + (2*h*model["heads"]*d + 2*h*model["groups"]*d)//tp
    exp = 0
    if model["experts"]:
        exp = layers*((model["experts"]//ep)*3*h*f//etp + h*model["experts"])
    else:
        per += 3*h*f//tp
    V = -(-model["vocab"]//(128*tp))*128*tp
    n = layers*per + first*V*h//tp + last*h
    if last and not (model["tied"] and first): n += V*h//tp
    return {"dense": n, "experts": exp}


# %% wrong: router of local experts
# mistake: Every rank has the router whole: its tokens choose among all experts, not among those of the rank.
# the router of a rank chooses among its own experts
def stage_parameters(model, layers, first, last, tp, ep, etp):
    h, d, f = model["h"], model["d"], model["f"]
    per = 2*h + (2*h*model["heads"]*d + 2*h*model["groups"]*d)//tp
    exp = 0
    if model["experts"]:
        per += h*model["experts"]//ep
        exp = layers*(model["experts"]//ep)*3*h*f//etp
    else:
        per += 3*h*f//tp
    V = -(-model["vocab"]//(128*tp))*128*tp
    n = layers*per + first*V*h//tp + last*h
    if last and not (model["tied"] and first): n += V*h//tp
    return {"dense": n, "experts": exp}
# %% wrong: asks the planner
# told: closed in this exercise
def stage_parameters(model, layers, first, last, tp, ep, etp):
    from minimegatron.footprint.states import meta_model
    from minimegatron.models.families import family_config

    config = family_config("llama", num_layers=layers, hidden_size=model["h"])
    return {"dense": sum(p.numel() for p in meta_model(config).parameters()), "experts": 0}


