# told: from ZeRO-2 on | from ZeRO-3 | by ZeRO-3 | optimizer's state
# 16 bytes, all shared out at once
def state_bytes(dense, experts, layout, zero, precision):
    same = layout["cp"] * layout["dp"]
    copies = layout["tp"] * same // (layout["ep"] * layout["etp"])
    n = dense // same + experts // copies if zero else dense + experts
    sizes = (2, 4, 4, 8) if precision == "bf16" else (4, 4, 0, 8)
    return dict(zip(("parameters", "gradients", "main parameters", "moments"), (n * k for k in sizes)))
