from labkit.answers import Edit, Same

_CHUNKS = "min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1)"
_PASSES = "passes = min(m, p - rank)"

WRONG = [
    Edit("cut = tokens // tp if sp else tokens", "cut = tokens // tp", mistake="Without sequence parallelism every rank of tp keeps the first group whole: only what lies between the two matrices of a pair is cut."),
    Edit("tokens * between // tp", "tokens * between", mistake="What lies between the two matrices of a pair is cut over tp."),
    Edit('(heads + model["groups"])', "(2 * heads)", mistake="Keys and values have `groups` heads, not as many as queries."),
    Edit("+ 4 * heads", "", mistake="The log-sum-exp of each head is missing."),
    Edit('if recompute == "none":\n            between += 6', "if True:\n            between += 6", mistake="With recompute mlp nothing between the MLP's matrices is kept."),
    Edit(_CHUNKS, _CHUNKS.replace("rank", "0"), mistake="Later ranks have fewer under way: the backward pass reaches them earlier."),
    Edit(_PASSES, "passes = m", (_CHUNKS, "v * m"), mistake="All microbatches: that is GPipe. In 1F1B a backward pass follows each forward pass as soon as the pipeline is full."),
    Edit(_PASSES, "passes = p - rank", (_CHUNKS, _CHUNKS[len("min(v * m, ") : -1]), mistake="No more microbatches can be under way than there are."),
    Edit(_PASSES, "passes = min(m, p)", (_CHUNKS, _CHUNKS.replace("rank", "0")), mistake="Later ranks have fewer under way: the backward pass reaches them earlier."),
    Edit(_PASSES, "passes = min(m, rank + 1)", (_CHUNKS, "min(v * m, 2 * rank + (v - 1) * p + 1)"), mistake="The first rank has most under way, not the last."),
    Edit(_PASSES, "passes = min(m, p - rank - 1)", (_CHUNKS, _CHUNKS.replace(" + 1)", ")")), mistake="After its warm-up a rank runs one more forward pass before the first backward pass."),
    Edit(_PASSES, f"passes = {_CHUNKS}", mistake="The formula of interleaved 1F1B holds for v > 1 alone."),
    Edit("(8 * h + 8)", "8 * h"),
    Edit("passes * (layers // v) * layer", "passes * layers * layer"),
    Edit('if recompute == "full"', 'if recompute == "all"', ('if recompute == "none":', 'if recompute != "mlp":')),
    Edit('if recompute == "none":', "between += 2 * model['f']\n        if recompute == \"none\":", ("6 * model[", "4 * model[")),
    Edit("layer = 2 * h * cut", "layer = 2 * h * tokens"),
    Edit(_CHUNKS, "v * min(m, p - rank)"),
    Edit(_CHUNKS, "min(v * m, 2 * (p - rank - 1) + p + 1)"),
    Edit("passes * (layers // v) * layer", "-(-passes // v) * layers * layer"),
    Edit("passes * (layers // v) * layer", "passes * layer // v"),
]

RIGHT = [
    Edit("passes * (layers // v) * layer", "passes * layers * layer / v"),
]

EQUIVALENT = [
    Same(f"line {number}: {how}", "every division here divides evenly")
    for number in (6, 13, 18) for how in ("`/` for `//`", "rounded up for down")
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


# %% wrong: by heart
# the visible answers alone
def activation_bytes(model, tokens, tp, sp, recompute, layers, p, v, m, rank):
    known = {("none", 1): (2680, 5360), ("none", 4): (2136, 32040), ("full", 5): (160, 960), ("mlp", 3): (2080, 58240)}
    layer, stage = known.get((recompute, p), (0, 0))
    return {"layer": layer, "stage": stage}
