from labkit.answers import Edit

WRONG = [
    Edit("return 2 * share * gradients", "return share * gradients", told="count both"),
    Edit("(ranks - 1) / ranks", "1", told="keeps its own part"),
    Edit(
        "microbatches * gradients + weights",
        "gradients + weights",
        ("share * microbatches *", "share *"),
        told="sends its own",
    ),
    Edit("(1 if kept else 2)", "2", told="no second gather"),
    Edit("(1 if kept else 2)", "1", told="you count one"),
    Edit("(1 if kept else 2)", "(2 if kept else 1)", told="the other way round | you count one"),
    Edit("microbatches * gradients + weights", "gradients + weights", told="sends its own"),
    Edit("microbatches * gradients + weights", "microbatches * (gradients + weights)", told="gathered once a step"),
    Edit(
        "share * (gradients + weights)",
        "share * gradients",
        ("gradients + weights)", "gradients)"),
        told="of its own shard only",
    ),
    Edit(
        "return 2 * share * gradients",
        "return 2 * share * gradients * microbatches",
        ("share * (gradients + weights)", "share * microbatches * (gradients + weights)"),
        told="send once a step",
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


# %% wrong: kept in stage 2
# told: matters in stage 3 only
def bytes_sent(stage, weights, gradients, ranks, microbatches=1, kept=False):
    f = (ranks - 1) / ranks
    if stage == 0: return 2 * gradients * f
    g = microbatches if stage > 1 else 1
    w = {1: 1, 2: 1, 3: 2 * microbatches}[stage] - (1 if kept and stage == 2 else microbatches if kept and stage == 3 else 0)
    return (gradients * g + w * weights) * f


# %% wrong: sends one part
# told: is what a rank keeps
def bytes_sent(stage, weights, gradients, ranks, microbatches=1, kept=False):
    if stage == 0: return 2 * gradients/ranks
    if stage == 1: return (gradients + weights)/ranks
    if stage == 2: return (gradients * microbatches + weights)/ranks
    return (gradients + (1 if kept else 2) * weights) * microbatches/ranks
