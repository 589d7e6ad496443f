from labkit.answers import Edit

WRONG = [
    Edit("stage >= 2", "stage >= 1", ("stage >= 3", "stage >= 1"), mistake="Everything is divided from stage 1 on. Each stage shares out one more of the three."),
    Edit(
        "stage >= 2", "stage >= 1", ("optimizer / (ranks if stage >= 1", "optimizer / (ranks if stage >= 2"),
        mistake="Stage 1 shares out the optimizer's state, the largest of the three; gradients come next.",
    ),
    Edit("stage >= 3", "stage >= 4", mistake="In stage 3 the weights are shared out, too."),
    Edit(
        "stage >= 1", "stage > 1", ("stage >= 2", "stage > 2"), ("stage >= 3", "stage > 3"),
        mistake="Off by one stage: stage 1 already shares out the optimizer's state.",
    ),
    Edit(
        "stage >= 1", "stage == 1", ("stage >= 2", "stage == 2"),
        mistake="A higher stage keeps what a lower one has shared out: the optimizer's state is divided in stages 1, 2, 3.",
    ),
    Edit("stage >= 1", "stage == 1", mistake="A higher stage keeps what a lower one has shared out: the optimizer's state is divided in stages 1, 2, 3."),
    Edit(
        "optimizer / (ranks if stage >= 1 else 1)",
        "optimizer if stage < 1 else parameters // ranks * optimizer",
        ("gradient / (ranks if stage >= 2 else 1)", "gradient if stage < 2 else parameters // ranks * gradient"),
        ("weight / (ranks if stage >= 3 else 1)", "weight if stage < 3 else parameters // ranks * weight"),
        mistake="The parameters of a rank are rounded to a whole number here. Do not round: a part is a fraction of all bytes.",
    ),
    Edit("parameters * optimizer", "parameters * 12"),
    Edit("parameters * gradient", "parameters * weight"),
]

RIGHT = [
    Edit("parameters * weight / (ranks if stage >= 3 else 1)", "parameters * weight / ranks ** (stage > 2)"),
    Edit("(ranks if stage >= 2 else 1)", "[1, 1, ranks, ranks][stage]"),
    Edit("(ranks if stage >= 1 else 1)", "(ranks if stage else 1)"),
]
