from labkit.answers import Edit, Same

_MESSAGES = 'run["m"] * (2 + run["layers"] * (4 + again))'

_EVEN = "every matrix is cut into equal parts"

WRONG = [
    Edit("(4 + again)", "(4 + 2 * again)", mistake="Recompute does not need the result of a layer's last sum: nobody reads it a second time."),
    Edit("(4 + again)", "4", mistake="The forward pass that is repeated has a sum in its middle, which its backward pass needs."),
    Edit("(4 + again)", "(2 + again)", mistake="A layer sums two results in the forward pass, and two gradients in the backward pass."),
    Edit('(2 + run["layers"]', '(run["layers"]', mistake="The embedding's result and the gradient of the output layer's input are summed, too."),
    Edit(_MESSAGES, '(2 + run["layers"] * (4 + again))', mistake="Every microbatch has its sums."),
    Edit(' if run["tp"] > 1 else 0', "", mistake="An axis of one rank sends nothing."),
    Edit(' if run["dp"] > 1 else 0', "", mistake="One replica has nobody to sum gradients with."),
    Edit('(6 + 2 * again)', "6", mistake="Recompute runs the layers forward once more: 2 FLOPs more a weight and token."),
    Edit('(6 + 2 * again) * weights', '(6 + 2 * again) * weights + 2 * again * run["head"]', mistake="The output layer is not recomputed."),
    Edit("6 * run[\"head\"]", "12 * run[\"head\"]", mistake="Looking up the embedding is no product."),
    Edit(') / run["tp"],\n        "messages"', '),\n        "messages"', mistake="tp shares out the products."),
    Edit('4 * (weights + 2 * run["head"]) / run["tp"]', '4 * (weights + 2 * run["head"])', mistake="A rank of tp has a share of the gradients, and sums only that over dp."),
    Edit('4 * (weights + 2 * run["head"])', 'run["m"] * 4 * (weights + 2 * run["head"])', mistake="Gradients are summed over dp once a step, after all microbatches."),
    Edit('(weights + 2 * run["head"])', '(weights + run["head"])', mistake="The embedding has gradients as the output matrix has, and as many."),
    Edit("messages * tokens * run[\"h\"] * 4", "messages * run[\"s\"] * run[\"h\"] * 4", mistake="A summed tensor has all samples of the microbatch."),
    Edit("messages * tokens * run[\"h\"] * 4", "messages * tokens * run[\"h\"] * 4 / run[\"tp\"]", mistake="Every rank of tp sums the whole tensor."),
    Edit("messages * tokens * run[\"h\"] * 4", "messages * tokens * run[\"h\"] * 8 * (run[\"tp\"] - 1) / run[\"tp\"]", mistake="tp_bytes are the sizes of the tensors that are summed, and not what a ring sends of them."),
    Edit("messages * tokens * run[\"h\"] * 4", "messages * tokens * run[\"h\"] * 2", mistake="A number in fp32 has 4 bytes."),
]

EQUIVALENT = [
    Same("line 7: `//` for `/`", _EVEN),
    Same("line 10: `//` for `/`", _EVEN),
]


# %% right: a loop
def step_work(run):
    tp, dp = run["tp"], run["dp"]
    size = run["b"] * run["s"] * run["h"] * 4
    flops, messages = 0.0, 0
    for _ in range(run["m"]):
        for _ in range(run["layers"]):
            passes = 4 if run["recompute"] else 3
            flops += 2 * passes * run["b"] * run["s"] * run["layer"] / tp
            messages += 5 if run["recompute"] else 4
        flops += 6 * run["b"] * run["s"] * run["head"] / tp
        messages += 2
    if tp == 1:
        messages = 0
    gradients = (run["head"] * 2 + run["layers"] * run["layer"]) * 4 / tp
    return {"flops": flops, "messages": messages, "tp_bytes": messages * size, "dp_bytes": gradients * (dp > 1)}


# %% right: sums of a list
def step_work(run):
    passes = [2, 2, 2] + [2] * run["recompute"]
    kinds = ["embedding", "logits"] + ["attention", "mlp"] * 2 * run["layers"] + ["attention"] * run["layers"] * run["recompute"]
    sums = len(kinds) * run["m"] if run["tp"] != 1 else 0
    samples = run["m"] * run["b"] * run["s"]
    products = samples * (sum(passes) * run["layers"] * run["layer"] + 6 * run["head"])
    held = run["layers"] * run["layer"] + run["head"] + run["head"]
    return dict(
        flops=products / run["tp"], messages=sums, tp_bytes=sums * 4 * run["b"] * run["s"] * run["h"],
        dp_bytes=0 if run["dp"] == 1 else 4 * held / run["tp"],
    )


# %% right: unpacked
def step_work(run):
    n, h, w, v, s, t, d, b, m, r = (run[k] for k in ("layers", "h", "layer", "head", "s", "tp", "dp", "b", "m", "recompute"))
    count = (n * (5 if r else 4) + 2) * m * (t > 1)
    return {
        "dp_bytes": (n * w + 2 * v) * 4 / t if d != 1 else 0.0,
        "flops": (8 if r else 6) * n * w * m * b * s / t + 6 * v * m * b * s / t,
        "messages": count,
        "tp_bytes": count * b * s * h * 4,
    }
