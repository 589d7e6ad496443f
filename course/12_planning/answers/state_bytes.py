from labkit.answers import Edit, Same

_WHOLE = "every division here divides evenly"

WRONG = [
    Edit(
        'same = layout["cp"] * layout["dp"]',
        'same = layout["dp"]',
        ('layout["tp"] * same //', 'layout["tp"] * layout["cp"] * layout["dp"] //'),
        mistake="Ranks of cp hold the same parameters as well: they share the state of a dense parameter, too.",
    ),
    Edit(
        'same = layout["cp"] * layout["dp"]',
        'same = layout["dp"]',
        ("experts // expert_dp", "experts // same"),
        mistake="Ranks of cp hold the same parameters as well: they share the state of a dense parameter, too.",
    ),
    Edit("experts // expert_dp", "experts // same", mistake="An expert lies on fewer ranks, or on more, than a dense parameter: ep and etp cut it, tp and cp " "do not."),
    Edit('layout["tp"] * same // (layout["ep"] * layout["etp"])', 'same // layout["ep"] or 1'),
    Edit('same = layout["cp"] * layout["dp"]', 'same = layout["cp"] * layout["dp"] * layout["pp"]'),
    Edit('"bf16": (2, 4, 4, 8)', '"bf16": (2, 2, 4, 8)', mistake="Gradients are kept in fp32 here, 4 bytes each."),
    Edit(
        '"bf16": (2, 4, 4, 8), "fp32": (4, 4, 0, 8)', '"bf16": (2, 4, 4, 4), "fp32": (4, 4, 0, 4)', mistake="AdamW keeps two moments of each parameter."
    ),
    Edit('"bf16": (2, 4, 4, 8)', '"bf16": (2, 4, 0, 8)', mistake="In bf16 the optimizer has an fp32 copy of the parameters, the main parameters."),
    Edit('"fp32": (4, 4, 0, 8)', '"fp32": (4, 4, 4, 8)', mistake="In fp32 the parameters themselves are the main parameters; there is no copy."),
    Edit("(3, 2, 1, 1)", "(3, 1, 1, 1)", mistake="ZeRO-1 shares out the optimizer's state; gradients from ZeRO-2 on."),
    Edit("(3, 2, 1, 1)", "(2, 2, 1, 1)", mistake="Parameters are shared out by ZeRO-3."),
    Edit("(3, 2, 1, 1)", "(3, 3, 1, 1)", mistake="ZeRO-1 shares out the optimizer's state; gradients from ZeRO-2 on."),
    Edit("(3, 2, 1, 1)", "(3, 2, 2, 1)", told="optimizer's state"),
    Edit("(3, 2, 1, 1)", "(1, 2, 3, 3)", mistake="The stages of ZeRO stand the other way round: 1 is the optimizer's state, 3 the parameters."),
    Edit("zero >= stage", "zero > stage"),
    Edit("zero >= stage", "zero == stage"),
    Edit("nbytes * (dense // same + experts // expert_dp)", "nbytes * ((dense + experts) // same)"),
    Edit("nbytes * (dense + experts)", "nbytes * dense"),
    Edit('(layout["ep"] * layout["etp"])', 'layout["ep"]', mistake="etp cuts an expert: its ranks hold different parts."),
    Edit("dense // same + experts", 'dense // (same * layout["tp"]) + experts', mistake="Ranks of tp hold different parts of a dense matrix, they share nothing of it."),
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
# mistake: `experts` are the parameters of this rank already: ep has divided them.
# ep divides once more
def state_bytes(dense, experts, layout, zero, precision):
    n = layout["dp"]*layout["cp"]
    e = layout["tp"]*n//(layout["etp"]*layout["ep"])
    experts = experts // layout["ep"]
    b = {"bf16": (2,4,4,8), "fp32": (4,4,0,8)}[precision]
    return {k: (dense//n*x + experts//e*x if zero>=z else (dense+experts)*x) for k,x,z in zip(("parameters","gradients","main parameters","moments"),b,(3,2,1,1))}


