# owners by the letters of ZeRO
def state_bytes(dense, experts, layout, zero, precision):
    ranks = layout["tp"] * layout["cp"] * layout["dp"]
    cut = [(dense, ranks // layout["tp"]), (experts, ranks // layout["ep"] // layout["etp"])]
    whole, shared = dense + experts, sum(n // k for n, k in cut)
    half = precision == "bf16"
    return {
        "moments": 8 * (shared if zero else whole),
        "main parameters": half * 4 * (shared if zero > 0 else whole),
        "gradients": 4 * (shared if zero > 1 else whole),
        "parameters": (2 if half else 4) * (shared if zero > 2 else whole),
    }
