from labkit.answers import Edit, Same

_INTERLEAVED = "min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1)"
_WHOLE = "every division here divides evenly"

WRONG = [
    Edit("cut = tokens // tp if sp else tokens", "cut = tokens // tp", mistake="Without sequence parallelism every rank of tp keeps the first group whole: only what lies " "between the two matrices of a pair is cut."),
    Edit("tokens * between // tp", "tokens * between", mistake="What lies between the two matrices of a pair is cut over tp."),
    Edit('(heads + model["groups"])', "(2 * heads)", mistake="Keys and values have `groups` heads, not as many as queries."),
    Edit("(8 * h + 8)", "8 * h", mistake="The statistics of the two norms are missing."),
    Edit('if recompute == "none":', "if True:", mistake="With recompute mlp nothing between the MLP's matrices is kept."),
    Edit(
        'if recompute == "full"',
        'if recompute == "all"',
        ('if recompute == "none":', 'if recompute != "mlp":'),
        mistake="With full recompute a layer keeps its input and nothing else.",
    ),
    Edit("layer = 2 * h * cut", "layer = 2 * h * tokens", mistake="With sequence parallelism the input of a layer is cut as well."),
    Edit("passes = min(m, p - rank)", "passes = 1", (_INTERLEAVED, "v"), mistake="Several microbatches are under way at once."),
    Edit("passes = min(m, p - rank)", "passes = m", (_INTERLEAVED, "v * m"), mistake="All microbatches: that is GPipe. In 1F1B a backward pass follows each forward pass as soon as " "the pipeline is full."),
    Edit(
        "passes = min(m, p - rank)",
        "passes = p - rank",
        (_INTERLEAVED, _INTERLEAVED[len("min(v * m, ") : -1]),
        mistake="No more microbatches can be under way than there are.",
    ),
    Edit(
        "passes = min(m, p - rank)",
        "passes = min(m, p)",
        (_INTERLEAVED, _INTERLEAVED.replace("rank", "0")),
        mistake="Later ranks have fewer under way: the backward pass reaches them earlier.",
    ),
    Edit(
        "passes = min(m, p - rank)",
        "passes = min(m, rank + 1)",
        (_INTERLEAVED, "min(v * m, 2 * rank + (v - 1) * p + 1)"),
        mistake="The first rank has most under way, not the last.",
    ),
    Edit(_INTERLEAVED, "v * min(m, p - rank)", mistake="With several chunks more is under way: see the formula for v > 1."),
    Edit("passes * (layers // v) * layer", "passes * layers * layer", mistake="What is under way with v chunks are passes of single chunks, each with layers / v layers."),
    Edit(_INTERLEAVED, "min(v * m, 2 * (p - rank - 1) + (v - 1) * p)", mistake="One forward pass more is under way than the warm-up has: the steady phase begins with a forward " "pass."),
    Edit("passes * (layers // v) * layer", "passes * layer // v", mistake="A rank has several layers."),
    Edit("+ 4 * heads", "", mistake="The log-sum-exp of each head is missing."),
    Edit(_INTERLEAVED, "min(v * m, 2 * (p - 1) + (v - 1) * p + 1)", mistake="Later ranks have fewer under way: the backward pass reaches them earlier."),
    Edit("passes * (layers // v) * layer", "-(-passes // v) * layers * layer", mistake="Single chunks of a microbatch are under way: they need not add up to whole microbatches."),
    Edit(_INTERLEAVED, "min(v * m, 2 * (p - rank - 1) + p + 1)", mistake="The warm-up goes through v - 1 chunks of p microbatches, however many v are."),
    Edit("+ 4 * heads", '+ 4 * (heads + model["groups"])'),
    Edit("min(m, p - rank)", "min(m, p - rank - 1)"),
    Edit('6 * model["f"]', '4 * model["f"]'),
    Edit('6 * (heads + model["groups"])', '(6 * heads + 4 * model["groups"])'),
    Edit(_INTERLEAVED, "min(v * m, p - rank + (v - 1) * p)"),
    Edit("layer = 2 * h * cut", "layer = (2 * h + 4) * cut"),
]

RIGHT = [
    Edit("min(m, p - rank)", "sorted((m, p - rank))[0]"),
    Edit("passes * (layers // v) * layer", "passes * layers * layer // v"),
    Edit("cut * (8 * h + 8) + tokens * between // tp", "cut * 8 * (h + 1) + tokens * between / tp"),
]

EQUIVALENT = [
    Same("line 6: `/` for `//`", _WHOLE),
    Same("line 6: rounded up for down", _WHOLE),
    Same("line 13: `/` for `//`", _WHOLE),
    Same("line 13: rounded up for down", _WHOLE),
    Same("line 18: `/` for `//`", _WHOLE),
    Same("line 18: rounded up for down", _WHOLE),
]


# %% right: the schedule is played: forward and backward passes of the rank are counted
def activation_bytes(model, tokens, tp, sp, recompute, layers, p, v, m, rank):
    h, a, g, d, f = (model[name] for name in ("h", "heads", "groups", "d", "f"))
    outside = tokens // tp if sp else tokens
    kept = {"full": {"input": 2 * h * outside}}
    kept["mlp"] = {"norms and inputs": 4 * 2 * h * outside, "statistics": 8 * outside,
                   "qkv": 2 * d * (a + 2 * g) * tokens // tp, "turned": 2 * d * (a + g) * tokens // tp,
                   "out": 2 * d * a * tokens // tp, "lse": 4 * a * tokens // tp}
    kept["none"] = {**kept["mlp"], "mlp": 3 * 2 * f * tokens // tp}
    layer = sum(kept[recompute].values())
    warm_up = p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p
    now = most = 0
    for i in range(m * v):
        now += 1
        most = max(most, now)
        if i >= warm_up:
            now -= 1
    return {"layer": layer, "stage": most * layer * layers // v}


# %% right: row by row of the table, in floats
def activation_bytes(model, tokens, tp, sp, recompute, layers, p, v, m, rank):
    h, d, a, g, f = (model[k] for k in ("h","d","heads","groups","f"))
    stream = tokens/(tp if sp else 1); t = tokens/tp
    rows = [stream*8*h, stream*8, t*2*d*(a+2*g), t*2*d*(a+g), t*2*d*a, t*4*a]
    rows += [t*6*f]*(recompute=="none")
    layer = sum(rows) if recompute!="full" else stream*2*h
    chunks = (min(m,p-rank) if v==1 else min(v*m, 2*(p-rank-1)+(v-1)*p+1))
    return {"layer": layer, "stage": chunks*layer*layers/v}


# %% wrong: always interleaved formula
# mistake: The formula of interleaved 1F1B holds for v > 1 alone.
# one formula for every v
def activation_bytes(model, tokens, tp, sp, recompute, layers, p, v, m, rank):
    h, d, a, g, f = (model[k] for k in ("h","d","heads","groups","f"))
    stream = tokens/(tp if sp else 1); t = tokens/tp
    whole = stream*8*h+ stream*8+ t*2*d*(a+2*g)+ t*2*d*(a+g)+ t*2*d*a+ t*4*a+t*6*f
    layer = {"none": whole, "mlp": whole-t*6*f, "full": stream*2*h}[recompute]
    chunks = min(v*m, 2*(p-rank-1)+(v-1)*p+1)
    return {"layer": layer, "stage": chunks*layer*layers/v}


# %% wrong: mlp keeps product
# mistake: With recompute mlp the product of gate and up is not kept, either.
# the product is the input of down, so it is kept
def activation_bytes(model, tokens, tp, sp, recompute, layers, p, v, m, rank):
    h, d, a, g, f = (model[k] for k in ("h","d","heads","groups","f"))
    stream = tokens/(tp if sp else 1); t = tokens/tp
    whole = stream*8*h+ stream*8+ t*2*d*(a+2*g)+ t*2*d*(a+g)+ t*2*d*a+ t*4*a+t*6*f
    layer = {"none": whole, "mlp": whole-t*4*f, "full": stream*2*h}[recompute]
    chunks = (min(m,p-rank) if v==1 else min(v*m, 2*(p-rank-1)+(v-1)*p+1))
    return {"layer": layer, "stage": chunks*layer*layers/v}


# %% wrong: one full layer recomputed
# mistake: What the backward pass computes again of one layer is gone when the next one begins: it is in no row of the table.
# the layer that is computed again is counted, too
def activation_bytes(model, tokens, tp, sp, recompute, layers, p, v, m, rank):
    h, d, a, g, f = (model[k] for k in ("h","d","heads","groups","f"))
    stream = tokens/(tp if sp else 1); t = tokens/tp
    whole = stream*8*h+ stream*8+ t*2*d*(a+2*g)+ t*2*d*(a+g)+ t*2*d*a+ t*4*a+t*6*f
    layer = {"none": whole, "mlp": whole-t*6*f, "full": stream*2*h}[recompute]
    chunks = (min(m,p-rank) if v==1 else min(v*m, 2*(p-rank-1)+(v-1)*p+1))
    return {"layer": layer, "stage": chunks*layer*layers/v + (whole-layer)}


# %% wrong: by heart
# the visible answers alone
def activation_bytes(model, tokens, tp, sp, recompute, layers, p, v, m, rank):
    known = {("none", 1): (2680, 5360), ("none", 4): (2136, 32040), ("full", 5): (160, 960), ("mlp", 3): (2080, 58240)}
    layer, stage = known.get((recompute, p), (0, 0))
    return {"layer": layer, "stage": stage}


