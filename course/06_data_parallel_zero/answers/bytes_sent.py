from labkit.answers import Edit

_EACH = "In stages 2 and 3 there is no whole gradient that could wait for the next microbatch: each of them sends its own."
_KEPT = "(1 if kept else 2)"

WRONG = [
    Edit("return 2 * share * gradients", "return share * gradients", mistake="An all-reduce is a reduce-scatter and an all-gather: count both."),
    Edit(_KEPT, "2", mistake="Where the weights are kept, the backward pass needs no second gather."),
    Edit(_KEPT, "1", mistake="Stage 3 gathers each weight twice, for the forward pass and again for the backward pass; you count one."),
    Edit(_KEPT, "(2 if kept else 1)", mistake="It is the other way round: kept weights are gathered once, the others twice."),
    Edit("(ranks - 1) / ranks", "1", mistake="A rank keeps its own part: (D-1)/D of the bytes leave."),
    Edit("(ranks - 1) / ranks", "1 / ranks", mistake="1/D of a tensor is what a rank keeps. It sends the rest."),
    Edit(
        "share * (gradients + weights)", "share * gradients", ("gradients + weights)", "gradients)"),
        mistake="After the step each rank has new weights of its own shard only: they are gathered.",
    ),
    Edit(
        "return 2 * share * gradients", "return 2 * share * gradients * microbatches",
        ("share * (gradients + weights)", "share * microbatches * (gradients + weights)"),
        mistake="Stages 0 and 1 add gradients up on the rank and send once a step.",
    ),
    Edit("microbatches * gradients", "gradients", ("share * microbatches *", "share *"), mistake=_EACH),
    Edit("microbatches * gradients", "gradients", mistake=_EACH),
    Edit("microbatches * gradients + weights", "microbatches * (gradients + weights)", mistake="In stage 2 weights change once a step, and are gathered once a step."),
]

RIGHT = [
    Edit("(ranks - 1) / ranks", "1 - 1 / ranks"),
    Edit(f"{_KEPT} * weights", "weights + (not kept) * weights"),
    Edit(
        "    if stage == 1:\n        return share * (gradients + weights)\n    if stage == 2:",
        "    if stage == 1:\n        microbatches = 1\n    if stage in (1, 2):",
    ),
]
