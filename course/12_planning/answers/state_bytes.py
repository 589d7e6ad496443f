from labkit.answers import Edit, Same

_BF16, _STAGES, _SAME = '"bf16": (2, 4, 4, 8)', "(3, 2, 1, 1)", 'same = layout["cp"] * layout["dp"]'
_SPREAD = 'layout["tp"] * same // (layout["ep"] * layout["etp"])'
_SHARED = "nbytes * (dense // same + experts // expert_dp)"

WRONG = [
    Edit(_STAGES, "(2, 2, 1, 1)", mistake="Parameters are shared out by ZeRO-3 alone."),
    Edit(_STAGES, "(1, 1, 1, 1)", mistake="Everything is shared out at once here. ZeRO-1 shares out the optimizer's state alone."),
    Edit(_STAGES, "(1, 2, 3, 3)", mistake="The stages of ZeRO stand the other way round: 1 is the optimizer's state, 3 the parameters."),
    Edit("zero >= stage", "zero == stage", mistake="Each stage of ZeRO shares out what the stages before it do, too."),
    Edit(_STAGES, "(3, 1, 1, 1)", mistake="Gradients are shared out from ZeRO-2 on."),
    Edit(_STAGES, "(3, 3, 1, 1)", mistake="Gradients are shared out from ZeRO-2 on."),
    Edit(_SAME, 'same = layout["dp"]', ('layout["tp"] * same //', 'layout["tp"] * layout["cp"] * same //'), mistake="Ranks of cp hold the same parameters as well: they share the state of a dense parameter, too."),
    Edit("experts // expert_dp", "experts // same", mistake="An expert lies on fewer ranks, or on more, than a dense parameter: ep and etp cut it, tp and cp do not."),
    Edit('(layout["ep"] * layout["etp"])', 'layout["ep"]', mistake="etp cuts an expert: its ranks hold different parts."),
    Edit(_SPREAD, 'max(1, same // (layout["ep"] * layout["etp"]))', mistake="The ranks of tp count, too: experts are spread over all tp cp dp ranks of a stage."),
    Edit(_SPREAD, 'max(1, same // layout["ep"])'),
    Edit(_BF16, '"bf16": (2, 2, 4, 8)', mistake="Gradients are kept in fp32 here, 4 bytes each."),
    Edit(_BF16, '"bf16": (2, 4, 0, 8)', mistake="In bf16 the optimizer has an fp32 copy of the parameters, the main parameters."),
    Edit(_STAGES, "(3, 2, 2, 1)"),
    Edit('"fp32": (4, 4, 0, 8)', '"fp32": (4, 4, 4, 8)'),
    Edit("zero >= stage", "zero > stage"),
    Edit(_SAME, _SAME + ' * layout["pp"]'),
    Edit("dense // same + experts", 'dense // (same * layout["tp"]) + experts'),
    Edit("experts // expert_dp", 'experts // layout["ep"] // expert_dp'),
    Edit("nbytes * (dense + experts)", "nbytes * dense"),
    Edit(_SHARED, "nbytes * dense // same + experts // expert_dp"),
]

RIGHT = [
    Edit("dense // same + experts // expert_dp", "dense / same + experts / expert_dp"),
    Edit("same // (layout[\"ep\"] * layout[\"etp\"])", "same // layout[\"ep\"] // layout[\"etp\"]"),
]

EQUIVALENT = [
    Same(f"line {number}: {how}{which}", "every division here divides evenly")
    for number, which in ((4, ""), (10, ""), (10, " (2)")) for how in ("`/` for `//`", "rounded up for down")
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
