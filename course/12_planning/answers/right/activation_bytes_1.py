# the schedule is played: forward and backward passes of the rank are counted
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
