from labkit.answers import Edit, Same

_WHOLE = "every division here divides evenly"

WRONG = [
    Edit(
        'same = layout["cp"] * layout["dp"]',
        'same = layout["dp"]',
        ('layout["tp"] * same //', 'layout["tp"] * layout["cp"] * layout["dp"] //'),
        told="Ranks of cp",
    ),
    Edit(
        'same = layout["cp"] * layout["dp"]',
        'same = layout["dp"]',
        ("experts // expert_dp", "experts // same"),
        told="Ranks of cp | dp alone",
    ),
    Edit("experts // expert_dp", "experts // same", told="ep and etp cut it"),
    Edit('layout["tp"] * same // (layout["ep"] * layout["etp"])', 'same // layout["ep"] or 1'),
    Edit('same = layout["cp"] * layout["dp"]', 'same = layout["cp"] * layout["dp"] * layout["pp"]'),
    Edit('"bf16": (2, 4, 4, 8)', '"bf16": (2, 2, 4, 8)', told="4 bytes each"),
    Edit(
        '"bf16": (2, 4, 4, 8), "fp32": (4, 4, 0, 8)', '"bf16": (2, 4, 4, 4), "fp32": (4, 4, 0, 4)', told="two moments"
    ),
    Edit('"bf16": (2, 4, 4, 8)', '"bf16": (2, 4, 0, 8)', told="fp32 copy"),
    Edit('"fp32": (4, 4, 0, 8)', '"fp32": (4, 4, 4, 8)', told="no copy"),
    Edit("(3, 2, 1, 1)", "(3, 1, 1, 1)", told="from ZeRO-2 on"),
    Edit("(3, 2, 1, 1)", "(2, 2, 1, 1)", told="by ZeRO-3"),
    Edit("(3, 2, 1, 1)", "(3, 3, 1, 1)", told="from ZeRO-2 on"),
    Edit("(3, 2, 1, 1)", "(3, 2, 2, 1)", told="optimizer's state"),
    Edit("(3, 2, 1, 1)", "(1, 2, 3, 3)", told="the other way round"),
    Edit("zero >= stage", "zero > stage"),
    Edit("zero >= stage", "zero == stage"),
    Edit("nbytes * (dense // same + experts // expert_dp)", "nbytes * ((dense + experts) // same)"),
    Edit("nbytes * (dense + experts)", "nbytes * dense"),
    Edit('(layout["ep"] * layout["etp"])', 'layout["ep"]', told="etp cuts"),
    Edit("dense // same + experts", 'dense // (same * layout["tp"]) + experts', told="nothing of it"),
    Edit("nbytes * (dense // same + experts // expert_dp)", "nbytes * dense // same + experts // expert_dp"),
]

RIGHT = [
    Edit("dense // same + experts // expert_dp", "dense / same + experts / expert_dp"),
    Edit("if zero >= stage", "if stage <= zero"),
    Edit(
        'layout["tp"] * same // (layout["ep"] * layout["etp"])',
        'layout["tp"] * layout["cp"] * layout["dp"] // layout["ep"] // layout["etp"]',
    ),
]

EQUIVALENT = [
    Same("line 4: `/` for `//`", _WHOLE),
    Same("line 4: rounded up for down", _WHOLE),
    Same("line 10: `/` for `//`", _WHOLE),
    Same("line 10: `/` for `//` (2)", _WHOLE),
    Same("line 10: rounded up for down", _WHOLE),
    Same("line 10: rounded up for down (2)", _WHOLE),
]


# %% right: owners by the letters of ZeRO
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


# %% wrong: cut again by ep
# told: already
# ep divides once more
def state_bytes(dense, experts, layout, zero, precision):
    n = layout["dp"]*layout["cp"]
    e = layout["tp"]*n//(layout["etp"]*layout["ep"])
    experts = experts // layout["ep"]
    b = {"bf16": (2,4,4,8), "fp32": (4,4,0,8)}[precision]
    return {k: (dense//n*x + experts//e*x if zero>=z else (dense+experts)*x) for k,x,z in zip(("parameters","gradients","main parameters","moments"),b,(3,2,1,1))}


# %% wrong: one law
# told: from ZeRO-2 on | from ZeRO-3 | by ZeRO-3 | optimizer's state
# 16 bytes, all shared out at once
def state_bytes(dense, experts, layout, zero, precision):
    same = layout["cp"] * layout["dp"]
    copies = layout["tp"] * same // (layout["ep"] * layout["etp"])
    n = dense // same + experts // copies if zero else dense + experts
    sizes = (2, 4, 4, 8) if precision == "bf16" else (4, 4, 0, 8)
    return dict(zip(("parameters", "gradients", "main parameters", "moments"), (n * k for k in sizes)))
