from labkit.answers import Edit

WRONG = [
    Edit("return 2 * share * gradients", "return share * gradients", mistake="An all-reduce is a reduce-scatter and an all-gather: count both."),
    Edit("(ranks - 1) / ranks", "1", mistake="A rank keeps its own part: (D-1)/D of the bytes leave."),
    Edit(
        "microbatches * gradients + weights",
        "gradients + weights",
        ("share * microbatches *", "share *"),
        mistake="In stages 2 and 3 there is no whole gradient that could wait for the next microbatch: each of " "them sends its own.",
    ),
    Edit("(1 if kept else 2)", "2", mistake="Where the weights are kept, the backward pass needs no second gather."),
    Edit("(1 if kept else 2)", "1", mistake="Stage 3 gathers each weight twice, for the forward pass and again for the backward pass; you " "count one."),
    Edit("(1 if kept else 2)", "(2 if kept else 1)", mistake="Stage 3 gathers each weight twice, for the forward pass and again for the backward pass; you " "count one."),
    Edit("microbatches * gradients + weights", "gradients + weights", mistake="In stages 2 and 3 there is no whole gradient that could wait for the next microbatch: each of " "them sends its own."),
    Edit("microbatches * gradients + weights", "microbatches * (gradients + weights)", mistake="`kept` matters in stage 3 only: in stage 2 weights are gathered once a step, after it, and that " "gather stays."),
    Edit(
        "share * (gradients + weights)",
        "share * gradients",
        ("gradients + weights)", "gradients)"),
        mistake="After the step each rank has new weights of its own shard only: they are gathered.",
    ),
    Edit(
        "return 2 * share * gradients",
        "return 2 * share * gradients * microbatches",
        ("share * (gradients + weights)", "share * microbatches * (gradients + weights)"),
        mistake="Stages 0 and 1 add gradients up on the rank and send once a step.",
    ),
]

RIGHT = [
    Edit("(ranks - 1) / ranks", "1 - 1 / ranks"),
    Edit("(1 if kept else 2) * weights", "weights + (not kept) * weights"),
    Edit(
        "    if stage == 1:\n        return share * (gradients + weights)\n    if stage == 2:",
        "    if stage == 1:\n        microbatches = 1\n    if stage in (1, 2):",
    ),
]


# %% wrong: sends one part
# mistake: 1/D of a tensor is what a rank keeps. It sends the rest.
def bytes_sent(stage, weights, gradients, ranks, microbatches=1, kept=False):
    if stage == 0: return 2 * gradients/ranks
    if stage == 1: return (gradients + weights)/ranks
    if stage == 2: return (gradients * microbatches + weights)/ranks
    return (gradients + (1 if kept else 2) * weights) * microbatches/ranks
