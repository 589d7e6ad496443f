from labkit.answers import Edit, Same

_QKV = "h * (wide + 2 * model[\"g\"] * model[\"d\"])"
_MLP = "3 * h * model[\"f\"]"
_AGAIN = "again = (6 * model[\"layers\"] * layer + attention) / 3"

WRONG = [
    Edit("(2 if sparse else 1)", "1", mistake="The peak with sparsity is twice the dense one: halve it."),
    Edit("gpus * sheet / (2 if sparse else 1)", "sheet / (2 if sparse else 1)", mistake="`rate` is of all GPUs together, so the peak is, too."),
    Edit("* 6 * wide * s", "* 12 * wide * s", mistake="Query i meets i keys, half of s on average: the full square counts scores twice."),
    Edit("* 6 * wide * s", "* 2 * wide * s", mistake="Scores and values have a backward pass, too: three times the products of the forward pass."),
    Edit("* 6 * wide * s", "* 3 * wide * s", mistake="Attention has two products, scores and values; you count one."),
    Edit("6 * parameters + attention", "6 * parameters", mistake="6 N leaves out scores and values, which are products without weights."),
    Edit(" + h * model[\"v\"]", " + 2 * h * model[\"v\"]", mistake="Looking up an embedding is no product: the vocabulary counts once, in the output layer."),
    Edit(" + h * model[\"v\"]", "", mistake="The output layer is a product, too: h times the vocabulary."),
    Edit(_QKV, "3 * h * wide", mistake="Keys and values have g heads, fewer than the queries."),
    Edit(_QKV, "h * (wide + model[\"g\"] * model[\"d\"])", mistake="Keys and values are two matrices."),
    Edit(_MLP, "2 * h * model[\"f\"]", mistake="This MLP has three matrices: gate, up and down."),
    Edit(" + wide * h + ", " + ", mistake="Behind the heads stands an output matrix."),
    Edit("wide = model[\"h\"], model[\"a\"] * model[\"d\"]", "wide = model[\"h\"], model[\"h\"]", mistake="a heads of d channels need not be h wide."),
    Edit(_AGAIN, "again = flops / 3", mistake="The output layer is not computed a second time."),
    Edit(_AGAIN, "again = 2 * model[\"layers\"] * layer", mistake="The forward pass of a layer has scores and values, too."),
    Edit("(flops + again) * rate", "flops * rate", mistake="The hardware's share (HFU) counts the second forward pass of the layers."),
]

EQUIVALENT = [
    Same("line 8: `//` for `/`", "both terms are multiples of 3: of 6, and of 6 again"),
    Same("line 9: `//` for `/`", "half a FLOP/s of 10¹² and more is lost"),
]


# %% right: forward passes, then times three
def mfu(model, s, rate, gpus, sheet, sparse):
    n, h, a, g, d, f, v = (model[k] for k in ("layers", "h", "a", "g", "d", "f", "v"))
    weights = h * a * d + 2 * h * g * d + a * d * h + h * f * 3
    forward = n * (2 * weights + 2 * a * d * s)
    flops = 3 * forward + 6 * h * v
    if sparse:
        sheet = sheet / 2
    share = rate / gpus / sheet
    return {"parameters": n * weights + v * h, "flops": flops, "mfu": flops * share, "hfu": (flops + forward) * share}


# %% right: a sum over layers
def mfu(model, s, rate, gpus, sheet, sparse):
    h, parameters, flops, hardware = model["h"], 0, 0, 0
    for _ in range(model["layers"]):
        q = model["a"] * model["d"]
        kv = model["g"] * model["d"]
        weights = sum([h * q, h * kv, h * kv, q * h, h * model["f"], h * model["f"], model["f"] * h])
        one = 2 * weights + 4 * q * (s / 2)
        parameters, flops, hardware = parameters + weights, flops + 3 * one, hardware + 4 * one
    head = h * model["v"]
    possible = gpus * (sheet * 0.5 if sparse else sheet)
    return {
        "parameters": parameters + head,
        "flops": flops + 6 * head,
        "mfu": (flops + 6 * head) * rate / possible,
        "hfu": (hardware + 6 * head) * rate / possible,
    }


# %% right: eighths of the layers
def mfu(model, s, rate, gpus, sheet, sparse):
    width = model["d"] * model["a"]
    layers = model["layers"] * (2 * model["h"] * (width + model["g"] * model["d"]) + 3 * model["h"] * model["f"])
    head = model["v"] * model["h"]
    of_layers = 6 * layers + 6 * s * width * model["layers"]
    per_flop = rate / (gpus * sheet) * (1 + sparse)
    return dict(
        parameters=layers + head, flops=of_layers + 6 * head, mfu=per_flop * (of_layers + 6 * head),
        hfu=per_flop * (of_layers * 4 / 3 + 6 * head),
    )
