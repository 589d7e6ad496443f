from labkit.answers import Edit

WRONG = [
    Edit("stage >= 2", "stage >= 1", ("stage >= 3", "stage >= 1"), told="shares out one more"),
    Edit("stage >= 1", "stage == 1", told="A higher stage keeps"),
    Edit("stage >= 3", "stage >= 4", told="In stage 3 the weights"),
    Edit(
        "stage >= 2",
        "stage >= 1",
        ("optimizer / (ranks if stage >= 1", "optimizer / (ranks if stage >= 2"),
        told="the largest of the three",
    ),
    Edit(
        "stage >= 1",
        "stage >= 2",
        ("gradient / (ranks if stage >= 2", "gradient / (ranks if stage >= 3"),
        ("weight / (ranks if stage >= 3", "weight / (ranks if stage >= 4"),
        told="Off by one stage",
    ),
    Edit("parameters * optimizer", "parameters * 12"),
    Edit(
        "optimizer / (ranks if stage >= 1 else 1)",
        "optimizer if stage < 1 else parameters // ranks * optimizer",
        ("gradient / (ranks if stage >= 2 else 1)", "gradient if stage < 2 else parameters // ranks * gradient"),
        ("weight / (ranks if stage >= 3 else 1)", "weight if stage < 3 else parameters // ranks * weight"),
        told="Do not round",
    ),
    Edit("parameters * gradient", "parameters * weight"),
]

RIGHT = [
    Edit("parameters * weight / (ranks if stage >= 3 else 1)", "parameters * weight / ranks ** (stage > 2)"),
    Edit("(ranks if stage >= 2 else 1)", "[1, 1, ranks, ranks][stage]"),
    Edit("(ranks if stage >= 1 else 1)", "(ranks if stage else 1)"),
]
